"""Files that are there whole or not at all, and outlast a power cut.

Of Python's own library alone: the process that writes checkpoints in the background starts in a few
hundredths of a second, and imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from mega_schema.errors import MegaError


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Around what writes: a disk that refuses is one line, and a person's to mend.

    Raises:
        MegaError: the system would not write, and did not say which file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        hint = "make room there, or write to another disk"
        raise MegaError(path, "not written", found=error.strerror, hint=hint) from None


@contextlib.contextmanager
def full_disk_errors(path: Path) -> Iterator[None]:
    """Around what reads and writes: a disk that is full is one line; any other error is passed on.

    Raises:
        MegaError: the disk, or a person's share of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_DISK_ERRORS:
            raise
        hint = "make room there, and run the same command again: it goes on where this one ended"
        raise MegaError(error.filename or path, "not written", found=error.strerror, hint=hint) from None


_FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def reserve(file: IO[bytes], size: int) -> None:
    """Give a new file a size, zeros, and room on the disk: a memory map of it cannot find the disk full.

    Raises:
        OSError: the disk is full.
    """
    if size:
        os.posix_fallocate(file.fileno(), 0, size)


def write_at(descriptor: int, values: memoryview, offset: int) -> None:
    """Write bytes to a place in a file.

    Raises:
        OSError: the disk is full, or would not write for another reason.
    """
    while len(values):  # a disk may take less than it is given
        count = os.pwrite(descriptor, values[:_WRITE_BYTES], offset)
        values, offset = values[count:], offset + count


def begin_flush(descriptor: int, offset: int, size: int) -> None:
    """Have the disk take bytes that were written, while others are: a flush later waits for little.

    A hint, for a system that has it (Linux: sync_file_range(2)), and no promise: `os.fsync` makes that.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, offset, size, _FLAG_WRITE)


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return cast(Callable[[int, int, int, int], int], function)


_WRITE_BYTES = 1 << 20  # bytes; of more, a system may look for large pages, which take it longer to find
_FLAG_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_SYNC_FILE_RANGE = _sync_file_range()


def partial_file(path: Path) -> Path:
    """The temporary name that `replacing` writes a file under."""
    return path.with_name(f".{path.name}.partial")


def own_partial_file(path: Path) -> Path:
    """A temporary name that no other process has, for a file that several may write at once."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


@contextlib.contextmanager
def atomic_write(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """A temporary name to write a file under; it becomes `path` when the block ends well, else it goes.

    Args:
        partial: the temporary name, beside `path`; None: `partial_file`.
    """
    partial = partial or partial_file(path)
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with path.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def sync_tree(folder: Path) -> None:
    """Flush every file in a folder and in the folders below it, and the folders themselves."""
    for path in folder.rglob("*"):
        sync_folder(path)  # the same call flushes a file
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
