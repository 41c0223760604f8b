"""Check and write the output files of commands that compute from results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import orjson

from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output


def check_folder(option: str, folder: Path) -> None:
    """Check that a folder for an output exists.

    Raises:
        ConfigError: it does not.
    """
    if not folder.is_dir():
        raise ConfigError(option, "no such folder", found=folder, hint=f"mkdir -p {folder}")


def check_output_file(
    option: str, path: Path | None, inputs: Iterable[Path], is_ours: Callable[[Path], bool]
) -> None:
    """Check that a file can be written; None is no output.

    Args:
        is_ours: whether an existing file may be replaced.

    Raises:
        ConfigError: its folder does not exist, or it is an input or a file that is not ours.
    """
    if path is not None:
        check_folder(option, path.parent)
        check_output(option, path, "file", inputs=inputs, is_ours=is_ours)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write an object as JSON, whole or not at all."""
    with atomic_write(path) as partial:
        partial.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
