"""Refuse an output that cannot be written, before the work that it is for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output


def check_output_file(
    flag: str, path: Path, *, is_ours: Callable[[Path], bool], inputs: Iterable[Path] = ()
) -> None:
    """Refuse a file that may not be replaced, or whose folder does not exist or cannot be written.

    Args:
        is_ours: whether an existing file was written by this command.
        inputs: files that the command reads.

    Raises:
        ConfigError: the path is refused.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        # a device: a rename would replace it
        raise ConfigError(flag, "is not a regular file", found=path, wanted="the path of a file")
    check_output(flag, path, "file", inputs=inputs, is_ours=is_ours)
    if not path.parent.is_dir():
        hint = f"mkdir -p {path.parent}"
        raise ConfigError(flag, "is in a folder that does not exist", found=path.parent, hint=hint)
    _check_writable(flag, "is in a folder that cannot be written", path.parent)


def check_output_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that does not exist or cannot be written.

    Raises:
        ConfigError: the folder is refused.
    """
    if not folder.exists():
        raise ConfigError(flag, "does not exist", found=folder, hint=f"mkdir -p {folder}")
    if not folder.is_dir():
        raise ConfigError(flag, "is a file", found=folder, wanted="a folder")
    _check_writable(flag, "cannot be written", folder)


def _check_writable(flag: str, what: str, folder: Path) -> None:
    # permissions alone do not tell: root may write everywhere, and a file system may be read-only
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise ConfigError(flag, what, found=f"{folder}: {error.strerror}") from None
