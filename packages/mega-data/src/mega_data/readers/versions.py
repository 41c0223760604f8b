"""Versions of input files: whether another process changed a file while it was read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mega_schema.errors import FormatError

FileVersion = tuple[int, ...]  # of a file: its size, inode and time of change; () of one that is gone


def file_version(path: Path) -> FileVersion:
    """The version of the file that a name leads to."""
    return version_of_stat(path.stat()) if path.exists() else ()


def version_of_stat(stat: os.stat_result) -> FileVersion:
    return stat.st_size, stat.st_ino, stat.st_mtime_ns


def check_version(path: Path, before: FileVersion) -> None:
    """See that the name still leads to the file of a version.

    Raises:
        FormatError: another process wrote it, replaced it or removed it meanwhile.
    """
    if (current := file_version(path)) != before:
        raise changed_error(path, before[0], current[0] if current else None)


@contextmanager
def check_unchanged(path: Path) -> Iterator[None]:
    """Around the reading of a file, however it ends.

    Raises:
        FormatError: another process wrote it, replaced it or removed it meanwhile.
    """
    before = version_of_stat(path.stat())
    try:
        yield
    except (FormatError, OSError):
        check_version(path, before)
        raise
    check_version(path, before)


def changed_error(path: Path, before: int, now: int | None) -> FormatError:
    """What is wrong with a file that had `before` bytes and has `now`, None for one that is gone."""
    found = "no such file" if now is None else f"{now:,} bytes"
    hint = "let whoever writes it end, then give the command again"
    wanted = f"the {before:,} bytes it had, untouched"
    return FormatError(path, "changed while it was read", found=found, wanted=wanted, hint=hint)
