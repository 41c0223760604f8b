"""Errors for input paths that are missing or of the wrong kind. Imports no numpy, for `--help`."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from mega_schema.errors import FormatError

_SIMILAR = 0.8  # least similarity of two names, of difflib


def build_path_error(path: Path, kind: Literal["file", "folder"], wanted: str = "") -> FormatError:
    """Return the error for a path that is not a file, or not a folder, with a hint that names what is there.

    Args:
        kind: what the path should be.
        wanted: a description of it; "" adds nothing to the kind.
    """
    hint = _suggest_path(path, kind)
    if path.exists():
        opposite = "folder" if kind == "file" else "file"
        return FormatError(path, f"is a {opposite}", wanted=wanted or f"a {kind}", hint=hint)
    values = {"wanted": wanted} if wanted else {}
    return FormatError(path, f"no such {kind}", **values, hint=hint)


def _suggest_path(path: Path, kind: Literal["file", "folder"]) -> str:
    if path.is_dir():
        return f"name a file in it: ls {path}"
    if path.exists():
        return f"name its folder, {path.parent}"
    folder = next(folder for folder in path.parents if folder.is_dir())
    if folder != path.parent:
        return f"ls {folder}"
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() == (kind == "folder")]
    close = get_close_matches(path.name, sorted(names), 1, _SIMILAR)
    return f"did you mean {folder / close[0]}?" if close else f"ls {folder}"
