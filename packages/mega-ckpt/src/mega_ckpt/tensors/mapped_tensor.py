"""One tensor in a file of another program: where its numbers lie, and the numbers, mapped."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mega_ckpt.tensors.dtypes import FLOATS
from mega_ckpt.tensors.parallel_map import Told, each
from mega_ckpt.tensors.storage import DAMAGED, Storage, read_blocks
from mega_schema.checkpoint import DTYPES
from mega_schema.errors import FormatError
from mega_schema.shard import Shape

# bytes of a number of every dtype a file may hold; buffers beside the weights have the odd ones
WIDTHS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
    | dict.fromkeys(("U32", "I32", "F32"), 4)
    | dict.fromkeys(("U64", "I64", "F64"), 8)
)
_BLOCK = 1 << 22  # bytes that are in memory at once


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file.

    Attributes:
        dtype: safetensors' name for it.
        offset: of its first number, in bytes from the beginning of the file.
        strides: numbers from one index to the next, a dimension each; None where the tensor lies in C order.
        storage: what the tensor lies in, of a file of `torch.save`.
    """

    file: Path
    dtype: str
    shape: Shape
    offset: int
    strides: Shape | None = None
    storage: Storage | None = field(default=None, compare=False)

    @property
    def bytes(self) -> int:
        """Of its numbers, each counted once."""
        return math.prod(self.shape) * WIDTHS[self.dtype]

    def values(self) -> np.ndarray:
        """The tensor as it is stored, mapped from the file, bfloat16 as its bits; for a dtype of DTYPES."""
        kind = DTYPES[self.dtype]
        if self.bytes == 0:  # nothing to map
            return np.empty(self.shape, kind)
        if self.strides is None:
            return np.memmap(self.file, kind, "r", self.offset, self.shape)
        span = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        flat = np.memmap(self.file, kind, "r", self.offset, (span,))
        steps = tuple(step * kind.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


def check_sums(tensors: Iterable[Stored]) -> None:
    """Hold what tensors lie in against the checksums that their files have of it. All cores read.

    Raises:
        FormatError: the bytes are not those that were written.
    """
    storages = {(t.file, t.storage) for t in tensors if t.storage is not None and t.storage.crc}
    each(sorted(storages, key=lambda job: (job[0], job[1].begin)), _check_sum, lambda _: None)


def _check_sum(job: tuple[Path, Storage], told: Told) -> None:
    file, storage = job
    crc = 0
    with file.open("rb") as opened:
        for block in read_blocks(opened, storage):
            crc = zlib.crc32(block, crc)
            told(len(block))
    if crc != storage.crc:
        raise FormatError(
            f"{file}: data/{storage.key}",
            "values are not those that were written: crc32",
            found=f"{crc:08x}",
            wanted=f"{storage.crc:08x}",
            hint=DAMAGED,
        )


def same(one: Stored, other: Stored) -> bool:
    """Whether two tensors are alike, bit by bit, a few megabytes of each in memory at once."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one == other or one.dtype not in FLOATS:  # no weights, and refused as such
        return True
    a, b = (np.atleast_1d(each.values()) for each in (one, other))
    bits, rows = f"u{a.itemsize}", max(1, _BLOCK // max(1, a[:1].nbytes))
    return all(
        np.array_equal(a[i : i + rows].view(bits), b[i : i + rows].view(bits)) for i in range(0, len(a), rows)
    )
