"""Write files that appear whole or not at all, and survive a power cut.

Uses Python's standard library only: the process that writes checkpoints in the background imports this, and
starts in a few hundredths of a second.
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
    """Convert a disk error to a one-line error for the user.

    Raises:
        MegaError: the system refused a write.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        hint = "free disk space, or write to another disk"
        raise MegaError(path, "not written", found=error.strerror, hint=hint) from None


@contextlib.contextmanager
def full_disk_errors(path: Path) -> Iterator[None]:
    """Convert a full-disk error to a one-line error for the user; other errors pass through.

    Raises:
        MegaError: the disk, or the user's quota, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_DISK_ERRORS:
            raise
        hint = "free disk space and run the same command again: it resumes"
        raise MegaError(error.filename or path, "not written", found=error.strerror, hint=hint) from None


_FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def reserve(file: IO[bytes], size: int) -> None:
    """Allocate a new file of zeros on the disk.

    Writing through a memory map then cannot find the disk full.

    Raises:
        OSError: the disk is full.
    """
    if size:
        os.posix_fallocate(file.fileno(), 0, size)


def write_at(descriptor: int, values: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file.

    Raises:
        OSError: the disk is full, or refused the write for another reason.
    """
    while len(values):  # a write may be partial
        count = os.pwrite(descriptor, values[:_WRITE_BYTES], offset)
        values = values[count:]
        offset = offset + count


def begin_flush(descriptor: int, offset: int, size: int) -> None:
    """Start to write a range of a file to the disk in the background, so that a later flush waits for less.

    A hint where the system has it (Linux: sync_file_range(2)), not a guarantee; `os.fsync` is that.
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


_WRITE_BYTES = 1 << 20  # bytes per call; larger writes may make the system look for large pages
_FLAG_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_SYNC_FILE_RANGE = _sync_file_range()


def partial_file(path: Path) -> Path:
    """Return the temporary name under which `atomic_write` writes a file."""
    return path.with_name(f".{path.name}.partial")


def own_partial_file(path: Path) -> Path:
    """Return a temporary name unique to this process, for a file that several may write at once."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


@contextlib.contextmanager
def atomic_write(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """Yield a temporary name to write a file under; rename it to `path` if the block succeeds.

    If the block fails, the temporary file is removed.

    Args:
        partial: the temporary name, in the same folder; None: `partial_file`.
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
    """Flush every file of a folder and its subfolders, and the folders themselves."""
    for path in folder.rglob("*"):
        sync_folder(path)  # also flushes files
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
