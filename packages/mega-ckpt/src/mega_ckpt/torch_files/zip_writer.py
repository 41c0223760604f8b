"""Write files of `torch.save` without torch, one tensor at a time: the zip of `zip_reader`.

`torch.load` can also map the files: data begins at multiples of 64 bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mega_ckpt.tensors.parallel_map import UpdateProgress, prefetch
from mega_ckpt.tensors.row_stream import as_bytes
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files.pickle_writer import dumps
from mega_schema.atomic_io import begin_flush
from mega_schema.checkpoint.reader import DTYPES

_ROOT = "archive"
_ALIGNMENT = 64  # bytes
_PADDING = 0x4246  # id of the extra field used as padding, as in torch
_HEADER = 30  # bytes before a member's name
_LARGE = 20  # bytes of the zip64 extra field
_SLICE = 1 << 18  # bytes checksummed at a time, so that they are still in the CPU's cache when written
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # constant: equal values give equal files


def write(
    path: Path,
    tree: Any,
    values: Callable[[TensorHeader], Iterable[np.ndarray]],
    update: UpdateProgress = lambda _: None,
) -> None:
    """Write a file and flush it to the disk.

    Args:
        tree: the value that `torch.load` will return; see `pickle_writer`. Tensors with the same header
            object share a storage.
        values: called once per tensor; yields its data in C order, in one or more parts.
        update: called with the bytes of each part.

    Raises:
        TypeError: the tree contains an unsupported type.
    """
    keys: dict[TensorHeader, str] = {}
    text = dumps(tree, lambda tensor: keys.setdefault(tensor, str(len(keys))))
    with path.open("wb") as out:
        with zipfile.ZipFile(out, "w") as archive:
            _write_member(archive, out, "data.pkl", len(text), [text])
            _write_member(archive, out, "byteorder", 6, [b"little"])
            parts = prefetch(part for tensor in keys for part in _parts(tensor, values(tensor)))
            with contextlib.closing(parts):
                for tensor, key in keys.items():
                    _write_member(
                        archive,
                        out,
                        f"data/{key}",
                        tensor.bytes,
                        _parts_of_tensor(tensor.bytes, parts, update),
                    )
            _write_member(archive, out, "version", 2, [b"3\n"])
        out.flush()
        os.fsync(out.fileno())


def _parts(tensor: TensorHeader, parts: Iterable[np.ndarray]) -> Iterator[memoryview]:
    size = 0
    for part in parts:
        assert part.dtype == DTYPES[tensor.dtype], f"{tensor.name}: {part.dtype} for {tensor.dtype}"
        size += part.nbytes
        if part.nbytes:
            yield as_bytes(part)
    assert size == tensor.bytes, f"{tensor.name}: {size} bytes for {tensor.bytes}"


def _parts_of_tensor(size: int, parts: Iterator[memoryview], update: UpdateProgress) -> Iterator[memoryview]:
    """Yield the parts of one tensor from the parts of all tensors."""
    while size:
        part = next(parts)
        yield part
        update(len(part))
        size -= len(part)


def _write_member(
    archive: zipfile.ZipFile, out: BinaryIO, name: str, size: int, parts: Iterable[bytes | memoryview]
) -> None:
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", _FIXED_DATE)
    large = size > zipfile.ZIP64_LIMIT
    used = out.tell() + _HEADER + len(info.filename) + (_LARGE if large else 0) + 4
    padding = -used % _ALIGNMENT
    info.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    written = 0
    with archive.open(info, "w", force_zip64=large) as member:
        for part in parts:
            for begin in range(0, len(part), _SLICE):
                member.write(part[begin : begin + _SLICE])
            written += len(part)
            begin_flush(out.fileno(), out.tell() - len(part), len(part))
    assert written == size, f"{name}: {written} bytes for {size}"
