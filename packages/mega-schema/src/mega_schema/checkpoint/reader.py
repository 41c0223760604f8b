"""Read checkpoints: safetensors pieces and a manifest, committed as a whole, read into any layout.

    RUN/latest_checkpointed_iteration.txt     "10"
    RUN/iter_0000010/manifest.json            format number, model, every tensor and the place of its pieces
                     trainer.json             iteration, consumed samples, schedule: the state of the run
                     tokenizer/               the tokenizer's files
                     run.toml                 the run's configuration
                     model-00000.safetensors  one file per writing rank and namespace
                     optim.exp_avg-00000.safetensors …

A piece is a box of a whole tensor in global coordinates. A reader asks for the boxes of its own layout, and
need not know the layout that wrote them. Padding is not on disk. docs/formats/checkpoint.md is the
specification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_schema.checkpoint.checkpoint_dir import MANIFEST, READABLE_FORMATS, RUN_CONFIG, TOKENIZER, TRAINER
from mega_schema.checkpoint.shard_file import BoxRecord
from mega_schema.checkpoint.side_files import (
    DIGEST,
    OTHER_ITERATION,
    check_manifest,
    check_regular,
    check_side_files,
    read_regular,
)
from mega_schema.checkpoint.tracker import latest_checkpoint
from mega_schema.errors import ConfigError, CorruptFileError, FormatError
from mega_schema.sharding import Overlap, Shape, Slab, overlap
from mega_schema.spec import ModelSpec

MODEL = "model"
MAIN = "optim.main"  # float32 weights, if the model's are narrower
MOMENTS = ("optim.exp_avg", "optim.exp_avg_sq")  # Adam's first and second
OPTIMIZER = (MAIN, *MOMENTS)
NAMESPACES = (MODEL, *OPTIMIZER, "optim.momentum")

# by safetensors' names; numpy has no bfloat16, which is stored as its 16 bits
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype("<u2"),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "U8": np.dtype("u1"),
    }
)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor, stored in a file.

    Attributes:
        file: name of the file in the checkpoint's folder.
        offset, bytes: where the values are in it, in C order, little endian.
        start, shape: the box in the whole tensor.
        crc32: checksum of those bytes.
    """

    file: str
    offset: int
    bytes: int
    start: Shape
    shape: Shape
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor in the manifest: its shape, its safetensors dtype, and its pieces."""

    shape: Shape
    dtype: str
    pieces: tuple[TensorPiece, ...]


class Checkpoint:
    """A committed checkpoint, open for reading. Files are mapped on demand; nothing is unpickled.

    Attributes:
        folder: its folder.
        spec: the model.
        iteration: optimizer steps done.
        tensors: namespace -> name -> tensor.
        files: name -> size in bytes of every shard file.
        written_by: tp and pp of the layout that wrote it; informational, readers do not need it.
        trainer: the content of trainer.json.
        format: version of its format.
    """

    def __init__(self, folder: Path) -> None:
        """Open the checkpoint in this folder; `open` also takes a run's folder.

        Raises:
            FormatError: the folder holds no checkpoint; a CorruptFileError if it is damaged.
        """
        self.folder = folder
        where = folder / MANIFEST
        content = read_regular(where)
        has_digest = check_manifest(folder, content)
        manifest = _json_object(where, content)
        version = manifest.get("format")
        if type(version) is not int or version not in READABLE_FORMATS:
            raise FormatError(where, "format", found=version, wanted=" or ".join(map(str, READABLE_FORMATS)))
        self.format = version
        if self.format > 1 and not has_digest:
            read_regular(folder / DIGEST)  # raises the error of a missing file
        self.trainer = _json_object(folder / TRAINER, read_regular(folder / TRAINER))
        try:
            if self.format > 1:
                check_side_files(folder, manifest["side_files"])
            self.spec = ModelSpec.from_dict(manifest["model"], f"{where}: model")
            (self.iteration,) = _counts([manifest["iteration"]])
            self.written_by: dict[str, int] = dict(manifest["layout"])
            self.files: dict[str, int] = dict(manifest["files"])
            _counts([*self.files.values()])
            self.tensors = {
                space: {name: _tensor(entry) for name, entry in entries.items()}
                for space, entries in manifest["tensors"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptFileError(
                where, "is not a manifest", found=f"{type(error).__name__} {error}"
            ) from error
        except ConfigError as error:
            raise CorruptFileError(where, str(error)) from error
        for space in self.tensors:
            if space not in NAMESPACES and Path(space).name == space:  # paths are refused below
                raise CorruptFileError(where, "unknown namespace", found=space, wanted=" | ".join(NAMESPACES))
        max_tensors = max(map(len, self.tensors.values()), default=0)
        if self.spec.layers > max_tensors:  # a corrupt layer count must not build a huge table
            raise CorruptFileError(
                where, "more layers than tensors", found=self.spec.layers, wanted=f"at most {max_tensors}"
            )
        self._check_files()

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open the checkpoint at `path`: an iteration's folder, or a run's folder, whose latest is opened.

        Raises:
            FormatError: there is none, or it is incomplete.
        """
        if (path / MANIFEST).is_file():
            return cls(path)
        return cls(latest_checkpoint(path))

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer's folder.

        Raises:
            FormatError: there is none; the hint adds that of a dataset PREFIX.
        """
        folder = self.folder / TOKENIZER
        if not folder.is_dir():
            hint = f"cp -r PREFIX.tokenizer {folder} && mega-ckpt verify {self.folder} --accept"
            raise FormatError(folder, "the checkpoint has no tokenizer", hint=hint)
        return folder

    def model_slab(self, name: str, slab: Slab) -> np.ndarray:
        """Read a box of a model weight, bfloat16 as float32."""
        return self.read(MODEL, name, slab)

    def read(self, namespace: str, name: str, slab: Slab) -> np.ndarray:
        """Read a box of a tensor as numbers; bfloat16 becomes float32, which is exact."""
        raw = self.read_raw(namespace, name, slab)
        if self.tensors[namespace][name].dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw

    def read_raw(self, namespace: str, name: str, slab: Slab) -> np.ndarray:
        """Read a box of a tensor as stored, bfloat16 as its 16 bits.

        Raises:
            FormatError: the checkpoint has no such tensor, or its pieces do not cover the box.
        """
        tensor = self.tensors.get(namespace, {}).get(name)
        if tensor is None:
            raise CorruptFileError(self.folder, "has no such tensor", wanted=f"{namespace} {name}")
        out = np.empty(slab.shape, DTYPES[tensor.dtype])
        covered = 0
        for piece in tensor.pieces:
            shared = overlap(slab.start, slab.shape, piece.start, piece.shape)
            if shared is not None:
                self._read_overlap(tensor, piece, shared, out)
                covered += math.prod(shared.shape)
        if covered != math.prod(slab.shape):
            raise CorruptFileError(
                f"{self.folder}: {namespace} {name}",
                "elements covered by pieces",
                found=covered,
                wanted=math.prod(slab.shape),
            )
        return out

    def _read_overlap(
        self, tensor: TensorEntry, piece: TensorPiece, shared: Overlap, out: np.ndarray
    ) -> None:
        """Copy the shared part of a piece to `out`.

        Whole rows are read, which is faster than mapping and leaves no mapped pages; parts of rows are
        mapped.
        """
        target = out[shared.a]
        if shared.shape[1:] != piece.shape[1:] or not target.flags.c_contiguous:
            target[...] = self.map_piece(tensor, piece)[shared.b]
            return
        path = self.folder / piece.file
        row = math.prod(piece.shape[1:]) * out.itemsize
        with path.open("rb", buffering=0) as file:
            file.seek(piece.offset + shared.in_b[0] * row)
            remaining = target.reshape(-1).view(np.uint8).data
            while len(remaining):
                count = file.readinto(remaining)
                if not count:
                    raise CorruptFileError(
                        path, "ends early", found=f"{file.tell()} bytes", hint=OTHER_ITERATION
                    )
                remaining = remaining[count:]

    def map_piece(self, tensor: TensorEntry, piece: TensorPiece) -> np.ndarray:
        """Return the values of one piece, mapped from its file."""
        return np.memmap(self.folder / piece.file, DTYPES[tensor.dtype], "r", piece.offset, piece.shape)

    def pieces(self) -> Iterator[tuple[str, str, TensorEntry, TensorPiece]]:
        """Yield every piece with its namespace, its tensor's name and its tensor."""
        for space, entries in self.tensors.items():
            for name, tensor in entries.items():
                for piece in tensor.pieces:
                    yield space, name, tensor, piece

    @property
    def run_config(self) -> str | None:
        """The run's configuration as TOML; None if there is none.

        Raises:
            CorruptFileError: it is not UTF-8.
        """
        file = self.folder / RUN_CONFIG
        if not file.exists():
            return None
        try:
            return read_regular(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(file, "is not UTF-8", found=error, hint=OTHER_ITERATION) from error

    def _check_files(self) -> None:
        # a namespace becomes part of a file's name when a tool rewrites the checkpoint
        for name in (*self.files, *self.tensors):
            if Path(name).name != name or name == "..":
                raise CorruptFileError(self.folder / MANIFEST, "name outside the checkpoint", found=name)
        for name, size in self.files.items():
            file = self.folder / name
            try:
                status = file.lstat()
            except FileNotFoundError:
                what = "missing file of a checkpoint"
                raise CorruptFileError(file, what, wanted=f"{size} bytes", hint=OTHER_ITERATION) from None
            check_regular(file, status.st_mode)
            if (actual_size := status.st_size) != size:
                raise CorruptFileError(
                    file, "size in bytes", found=actual_size, wanted=size, hint=OTHER_ITERATION
                )
        for space, name, tensor, piece in self.pieces():
            where = f"{self.folder / MANIFEST}: {space} {name}"
            wanted = math.prod(piece.shape) * DTYPES[tensor.dtype].itemsize
            if piece.bytes != wanted:
                raise CorruptFileError(where, "bytes of a piece", found=piece.bytes, wanted=wanted)
            if piece.file not in self.files:
                raise CorruptFileError(where, "piece in a file that is not listed", found=piece.file)
            end = piece.offset + piece.bytes
            if end > self.files[piece.file]:
                raise CorruptFileError(where, "end of a piece", found=end, wanted=f"within {piece.file}")


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']}")
    whole = _counts(entry["shape"])
    return TensorEntry(whole, entry["dtype"], tuple(_piece(p, whole) for p in entry["pieces"]))


def _piece(entry: Mapping[str, Any], whole: Shape) -> TensorPiece:
    start, shape = _counts(entry["start"]), _counts(entry["shape"])
    ends = [s + n for s, n in zip(start, shape, strict=True)]
    if any(end > dim_size for end, dim_size in zip(ends, whole, strict=True)) or 0 in shape:
        raise ValueError(f"a piece {shape} at {start} of a tensor {whole}")
    offset, size, crc32 = _counts([entry["offset"], entry["bytes"], entry["crc32"]])
    return TensorPiece(str(entry["file"]), offset, size, start, shape, crc32)


def _counts(values: Sequence[Any]) -> Shape:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values} instead of integers")
    return tuple(values)


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path, "is not JSON", found=error, hint=OTHER_ITERATION) from error
    if not isinstance(value, dict):
        raise CorruptFileError(path, "content", found=type(value).__name__, wanted="a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class BoxToWrite:
    """A box of a whole tensor that a rank is going to write, with the tensor's shape."""

    name: str
    whole: Shape
    slab: Slab
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.slab.shape) * DTYPES[self.dtype].itemsize

    def to_record(self) -> BoxRecord:
        """Return the box as a JSON object."""
        return {
            "name": self.name,
            "whole": self.whole,
            "dtype": self.dtype,
            "start": self.slab.start,
            "shape": self.slab.shape,
            "bytes": self.bytes,
        }


BoxValues = Callable[[BoxToWrite], np.ndarray]


def boxes_to_write(name: str, whole: Shape, slabs: Sequence[Slab], dtype: str) -> list[BoxToWrite]:
    """Return the boxes of one tensor that a rank is going to write."""
    return [BoxToWrite(name, whole, slab, dtype) for slab in slabs]
