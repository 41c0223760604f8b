"""Detect that a file cannot be read, or that another process changed it while it was read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mega_schema.errors import AccessError, CorruptFileError, FormatError

_LASTING_ERRORS: Final = (errno.EACCES, errno.EIO, errno.EISDIR, errno.EPERM)  # repeating gives the same
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


@contextmanager
def report_unreadable(path: Path) -> Iterator[None]:
    """Report a file that cannot be read as a damaged one, which `--on-error skip` skips.

    A place that cannot be reached is not reported: it concerns all of its files, and ends the run.

    Raises:
        CorruptFileError: the file may not be read, or its disk has an error.
    """
    try:
        yield
    except AccessError as error:
        raise CorruptFileError(path, error.what, **error.values, hint=error.hint) from None
    except OSError as error:
        if error.errno not in _LASTING_ERRORS:
            raise
        hint = "check its permissions and its disk"
        raise CorruptFileError(path, "not readable", found=error.strerror, hint=hint) from None
