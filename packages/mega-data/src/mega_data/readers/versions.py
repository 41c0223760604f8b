"""Detect that another process changed a file while it was read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mega_schema.errors import FormatError

FileVersion = tuple[int, ...]  # size, inode and mtime of a file; () if it is missing


def file_version(path: Path) -> FileVersion:
    """Return the version of the file at a path."""
    return version_of_stat(path.stat()) if path.exists() else ()


def version_of_stat(stat: os.stat_result) -> FileVersion:
    return stat.st_size, stat.st_ino, stat.st_mtime_ns


def check_version(path: Path, before: FileVersion) -> None:
    """Check that the path still leads to a file of this version.

    Raises:
        FormatError: another process wrote, replaced or removed it meanwhile.
    """
    if (current := file_version(path)) != before:
        raise changed_error(path, before[0], current[0] if current else None)


@contextmanager
def check_unchanged(path: Path) -> Iterator[None]:
    """Check that a file does not change while the block reads it, even if the block fails.

    Raises:
        FormatError: another process wrote, replaced or removed it meanwhile.
    """
    before = version_of_stat(path.stat())
    try:
        yield
    except (FormatError, OSError):
        check_version(path, before)
        raise
    check_version(path, before)


def changed_error(path: Path, before: int, now: int | None) -> FormatError:
    """Build the error for a file that had `before` bytes and now has `now`; None: it is missing."""
    found = "no such file" if now is None else f"{now:,} bytes"
    hint = "wait until the other process has finished, then run the command again"
    wanted = f"the {before:,} bytes it had, untouched"
    return FormatError(path, "changed while it was read", found=found, wanted=wanted, hint=hint)
