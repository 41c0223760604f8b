"""Read folders of torch.distributed.checkpoint (DCP) without torch.

    .metadata       a pickle: the size of every tensor, and the file and offset of each of its boxes
    __0_0.distcp    concatenated files of torch.save, one box each

Megatron stores the optimizer's state as sharded over its ranks: flat ranges of each rank's box. Such a tensor
has additional leading dimensions for the ranks' boxes, and "mcore_data" has its true size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mega_ckpt.checkpoint.verify import find_overlap
from mega_ckpt.tensors.mapped_tensor import DTYPE_BYTES, MappedTensor
from mega_ckpt.torch_files.pickle_reader import Unpickler
from mega_schema.checkpoint.flat_ranges import range_boxes
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape

METADATA = ".metadata"
_ORIGINAL = "nd_reformulated_orig_global_shape"
_PARSE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class DcpPiece:
    """A box of a tensor, and its mapped values."""

    start: Shape
    shape: Shape
    stored: MappedTensor


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor and the non-empty pieces that cover it."""

    shape: Shape
    pieces: tuple[DcpPiece, ...]

    def unstack(self) -> list[DcpTensor]:
        """Return the tensors that are stacked along its first dimension."""
        shape = self.shape[1:]
        by_index: list[list[DcpPiece]] = [[] for _ in range(self.shape[0])]
        for piece in self.pieces:
            for number in range(piece.shape[0]):
                part = DcpPiece(piece.start[1:], piece.shape[1:], _select_row(piece.stored, number))
                by_index[piece.start[0] + number].append(part)
        return [DcpTensor(shape, tuple(pieces)) for pieces in by_index]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """The content of a DCP folder.

    Attributes:
        others: names of the entries that are not tensors.
    """

    tensors: Mapping[str, DcpTensor]
    others: tuple[str, ...]


def open_dcp_folder(folder: Path, unpickler: Unpickler) -> DcpFolder:
    """Read .metadata and map the boxes of every tensor.

    Raises:
        FormatError: a file is missing or damaged, or its tensor does not match .metadata.
    """
    where = folder / METADATA
    tree = unpickler.open(where).tree
    try:
        version = tree.fields.get("version")
        if version is not None and not version.startswith("1."):
            raise FormatError(f"{where}: version", "is not known", found=version, wanted="1.0.0")
        described = {
            name: (entry.kind.rpartition(".")[2], entry.fields)
            for name, entry in tree.fields["state_dict_metadata"].items()
        }
        # Megatron's metadata; empty for a tensor stored unchanged
        truly = {
            k: tuple(v[_ORIGINAL]) for k, v in tree.fields.get("mcore_data", {}).items() if _ORIGINAL in v
        }
        places = _box_places(folder, tree.fields["storage_data"])
        tensors = {}
        for name, (kind, fields) in described.items():
            if kind == "TensorStorageMetadata":
                shape = truly.get(name, tuple(fields["size"]))
                if any(type(n) is not int or n < 1 for n in shape):
                    raise ValueError(f"{name}: shape {shape}")
                pieces = tuple(_pieces(name, fields, places, unpickler, truly.get(name)))
                tensors[name] = DcpTensor(shape, pieces)
                _check_cover(f"{where}: {name}", tensors[name])
    except _PARSE_ERRORS as error:
        found = f"{type(error).__name__} {error}"
        raise FormatError(where, "is not a checkpoint's description", found=found) from error
    return DcpFolder(tensors, tuple(name for name in described if name not in tensors))


ByteRange = tuple[Path, int, int]  # file, offset and number of bytes


def _box_places(folder: Path, storage: Mapping[Any, Any]) -> dict[tuple[str, Shape], ByteRange]:
    """Map (tensor name, first index of a box) to its byte range."""
    places = {}
    for index, info in storage.items():
        offset = index.fields.get("offset")
        if offset is None:  # not a tensor
            continue
        name = info.fields["relative_path"]
        fields = info.fields
        if Path(name).name != name or name == "..":
            raise FormatError(folder / METADATA, "file outside the folder", found=name)
        if fields.get("transform_descriptors"):
            raise FormatError(
                folder / name, "was written with transforms", found=fields["transform_descriptors"]
            )
        if not (folder / name).is_file():
            raise FormatError(folder / name, "missing file", wanted=f"a file that {METADATA} names")
        places[index.fields["fqn"], tuple(offset)] = (folder / name, fields["offset"], fields["length"])
    return places


def _pieces(
    name: str,
    fields: Mapping[str, Any],
    places: Mapping[tuple[str, Shape], ByteRange],
    unpickler: Unpickler,
    truly: Shape | None,
) -> Iterator[DcpPiece]:
    size = tuple(fields["size"])
    for chunk in fields["chunks"]:
        start, shape = tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])
        if any(s < 0 or n < 0 or s + n > whole for s, n, whole in zip(start, shape, size, strict=True)):
            raise ValueError(f"{name}: a box at {start} of {shape} in {size}")
        if 0 in shape:
            continue
        file, first, length = places[name, start]
        stored = unpickler.open(file, first, length).tree
        where = f"{file}: {name} at {start}"
        if not isinstance(stored, MappedTensor):
            raise FormatError(where, "is not a tensor", found=type(stored).__name__)
        if _without_ones(stored.shape) != _without_ones(shape) or (
            stored.shape != shape and stored.strides is not None
        ):
            raise FormatError(where, "shape", found=stored.shape, wanted=shape)
        stored = stored if stored.shape == shape else replace(stored, shape=shape)
        yield from (
            [DcpPiece(start, shape, stored)] if truly is None else _range_pieces(start, stored, size, truly)
        )


def _range_pieces(start: Shape, stored: MappedTensor, size: Shape, truly: Shape) -> Iterator[DcpPiece]:
    """Split a flat range of one rank's box into boxes of the tensor."""
    *parts, numbers = size
    local = tuple(whole // part for whole, part in zip(truly, parts, strict=True))
    if math.prod(local) != numbers or tuple(n * p for n, p in zip(local, parts, strict=True)) != truly:
        raise ValueError(f"{truly} in boxes, as {size}")
    if any(n != 1 for n in stored.shape[:-1]) or stored.strides is not None:
        raise ValueError(f"a range of numbers of shape {stored.shape}")
    corner = tuple(number * n for number, n in zip(start[:-1], local, strict=True))
    offset = stored.offset
    for begin, extent in range_boxes(local, start[-1], start[-1] + stored.shape[-1]):
        place = replace(stored, shape=extent, offset=offset)
        yield DcpPiece(tuple(c + b for c, b in zip(corner, begin, strict=True)), extent, place)
        offset += place.bytes


def _check_cover(where: str, whole: DcpTensor) -> None:
    if (overlapping := find_overlap(whole.pieces)) is not None:
        raise FormatError(
            where, "two boxes overlap", found=f"those at {overlapping[0].start} and {overlapping[1].start}"
        )
    covered = sum(math.prod(piece.shape) for piece in whole.pieces)
    if covered != math.prod(whole.shape):
        raise FormatError(where, "numbers in its boxes", found=covered, wanted=math.prod(whole.shape))


def _select_row(stored: MappedTensor, number: int) -> MappedTensor:
    """Select one index of a tensor's first dimension."""
    row_shape = stored.shape[1:]
    step = math.prod(row_shape) if stored.strides is None else stored.strides[0]
    offset = stored.offset + number * step * DTYPE_BYTES[stored.dtype]
    return replace(stored, shape=row_shape, offset=offset, strides=stored.strides and stored.strides[1:])


def _without_ones(shape: Shape) -> list[int]:
    return [n for n in shape if n != 1]
