"""Check and write the output files of commands that compute from results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import orjson

from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output


def check_folder(option: str, folder: Path) -> None:
    """Check that a folder for an output exists, and that a file can be created in it.

    Raises:
        ConfigError: it does not, or none can.
    """
    if not folder.is_dir():
        raise ConfigError(option, "no such folder", found=folder, hint=f"mkdir -p {folder}")
    try:
        # the permissions do not tell: root may write everywhere, and no file can be created in /proc
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"{folder} ({error.strerror})"
        raise ConfigError(
            option, "no file can be created in the folder", found=found, hint="name another folder"
        ) from None


def check_output_file(
    option: str,
    path: Path | None,
    inputs: Iterable[Path],
    is_ours: Callable[[Path], bool],
    *,
    suffix: str,
    overwrite: bool = False,
) -> None:
    """Check that a file can be written; None is no output.

    Args:
        suffix: of the file's name, such as ".json".
        is_ours: whether a file was written by this command, so that `overwrite` may replace it.
        overwrite: replace an existing file.

    Raises:
        ConfigError: its folder does not exist or cannot be written to, it is an input or a file that is not
            ours, its name ends otherwise, or it exists and may not be replaced.
    """
    if path is None:
        return
    check_folder(option, path.parent)
    check_output(option, path, "file", inputs=inputs, is_ours=is_ours)
    if path.suffix != suffix:
        hint = f"{option} {path.with_name(path.name + suffix)}"
        raise ConfigError(option, f"its name does not end in {suffix}", found=path, hint=hint)
    if path.exists() and not overwrite:
        hint = "name another, or add --overwrite"
        raise ConfigError(option, "a file of this name exists", found=path, hint=hint)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write an object as JSON, whole or not at all."""
    with atomic_write(path) as partial:
        partial.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
