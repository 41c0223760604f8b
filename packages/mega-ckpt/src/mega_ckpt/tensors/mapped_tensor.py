"""A tensor of a file, mapped into memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mega_ckpt.tensors.dtypes import FLOATS
from mega_ckpt.tensors.parallel_map import UpdateProgress, parallel_map
from mega_ckpt.tensors.storage import DAMAGED, Storage
from mega_schema.checkpoint.byte_range import crc32_of_range
from mega_schema.checkpoint.reader import DTYPES
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape

# bytes per element of every dtype in files; unusual ones occur in buffers
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
    | dict.fromkeys(("U32", "I32", "F32"), 4)
    | dict.fromkeys(("U64", "I64", "F64"), 8)
)
_BLOCK = 1 << 22  # bytes in memory at once


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor of a file.

    Attributes:
        dtype: safetensors' name for it.
        offset: offset in bytes of its first element in the file.
        strides: strides in elements, one per dimension; None for C order.
        storage: the tensor's storage in a file of `torch.save`.
    """

    file: Path
    dtype: str
    shape: Shape
    offset: int
    strides: Shape | None = None
    storage: Storage | None = field(default=None, compare=False)

    @property
    def bytes(self) -> int:
        """The bytes of the tensor's distinct elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def values(self) -> np.ndarray:
        """Map the tensor in its stored dtype, one of DTYPES; bfloat16 as uint16 bits."""
        kind = DTYPES[self.dtype]
        if self.bytes == 0:  # nothing to map
            return np.empty(self.shape, kind)
        if self.strides is None:
            return np.memmap(self.file, kind, "r", self.offset, self.shape)
        span = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        flat = np.memmap(self.file, kind, "r", self.offset, (span,))
        steps = tuple(step * kind.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


def verify_checksums(tensors: Iterable[MappedTensor]) -> None:
    """Verify the checksums of the storages of tensors, on all cores.

    Raises:
        FormatError: a checksum does not match.
    """
    storages = {(t.file, t.storage) for t in tensors if t.storage is not None and t.storage.crc}
    parallel_map(sorted(storages, key=lambda job: (job[0], job[1].begin)), _verify_checksum, lambda _: None)


def _verify_checksum(job: tuple[Path, Storage], update: UpdateProgress) -> None:
    file, storage = job
    with file.open("rb") as opened:
        crc = crc32_of_range(opened, storage.begin, storage.bytes, update)
    if crc != storage.crc:
        raise FormatError(
            f"{file}: data/{storage.key}",
            "values are not those that were written: crc32",
            found=f"{crc:08x}",
            wanted=f"{storage.crc:08x}",
            hint=DAMAGED,
        )


def tensors_equal(first: MappedTensor, second: MappedTensor) -> bool:
    """Return whether two tensors are bitwise equal; reads a few megabytes of each at once."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first == second or first.dtype not in FLOATS:  # not weights: refused later
        return True
    a, b = (np.atleast_1d(tensor.values()) for tensor in (first, second))
    bits = f"u{a.itemsize}"
    rows = max(1, _BLOCK // max(1, a[:1].nbytes))
    return all(
        np.array_equal(a[i : i + rows].view(bits), b[i : i + rows].view(bits)) for i in range(0, len(a), rows)
    )
