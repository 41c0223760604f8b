"""Read safetensors files (`mega_schema.checkpoint.safetensors_header`) without copying, and build headers.

The `safetensors` package has no numpy type for bfloat16; here it is uint16 (`DTYPES`), so copying is exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_ckpt.tensors.mapped_tensor import DTYPE_BYTES, MappedTensor
from mega_schema.checkpoint import safetensors_header
from mega_schema.checkpoint.reader import DTYPES
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape

_MOST_DIMS = 64
_LONGEST = 100_000_000  # maximum bytes of a header, as in the `safetensors` package


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a file."""

    entries: Mapping[str, MappedTensor]
    metadata: Mapping[str, str]


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of a file and check it against the file's size.

    Raises:
        FormatError: it is not a complete safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _LONGEST):
            raise FormatError(
                path, "header length in bytes", found=length, wanted=f"within the {size} bytes of the file"
            )
        text = file.read(length)
    try:
        header = json.loads(str(text, "utf-8"), object_pairs_hook=_unique_keys)
        metadata = dict(header.pop("__metadata__", {}))
        named = [(name, _entry(path, 8 + length, value)) for name, value in header.items()]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(
            path, "is not a safetensors file", found=f"{type(error).__name__} {error}"
        ) from error
    end = 8 + length
    for name, entry in sorted(named, key=lambda pair: (pair[1].offset, pair[1].bytes)):
        if entry.offset != end:
            raise FormatError(f"{path}: {name}", "first byte", found=entry.offset, wanted=end)
        end += entry.bytes
    if end != size:
        raise FormatError(path, "size in bytes", found=size, wanted=end)
    return SafetensorsHeader(dict(named), metadata)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the header's object; refuse duplicate keys, which readers resolve differently."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} twice")
    return entries


def _entry(path: Path, begin: int, value: Mapping[str, Any]) -> MappedTensor:
    dtype = value["dtype"]
    shape = tuple(value["shape"])
    first, last = value["data_offsets"]
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"{len(shape)} dimensions, more than {_MOST_DIMS}")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype}")
    if any(type(n) is not int or n < 0 for n in (*shape, first, last)):
        raise ValueError(f"shape {shape} at {first}:{last}")
    entry = MappedTensor(path, dtype, shape, begin + first)
    if last - first != entry.bytes:
        raise ValueError(f"{last - first} bytes for {dtype} {shape}")
    return entry


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, dtype and shape of a tensor to write: the header precedes all values."""

    name: str
    dtype: str
    shape: Shape

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def build_header(tensors: Sequence[TensorHeader], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file, and the offset of each tensor in it.

    Args:
        metadata: metadata of the file; `transformers` requires {"format": "pt"}.
    """
    entries = ((tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for tensor in tensors)
    header, offsets = safetensors_header.build_header(entries, metadata)
    return header, offsets[:-1]
