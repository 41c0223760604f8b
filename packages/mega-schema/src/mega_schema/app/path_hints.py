"""Suggest a dataset prefix for a path that is not one."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

_MAX_NAMES = 3  # datasets that a hint names


def suggest_dataset(prefix: Path, option: str = "") -> str:
    """Return a hint for a prefix without an index; "" if nothing is similar.

    Args:
        option: the option that takes the prefix; "" if it is an argument.
    """
    if prefix.is_file():
        stem = _stem(prefix)
        then = f"{option} {stem}_text_document".strip()
        return (
            f"{prefix} is a file, not the prefix of a dataset: mega-data preprocess --input {prefix} "
            f"--output-prefix {stem} --tokenizer-type TYPE, then {then}"
        )
    if prefix.is_dir():
        inside = _datasets(prefix)
        if inside:
            return f"datasets in this folder: {_list(inside)}"
        return "a folder without datasets; mega-data preprocess makes one of text"
    near = [path for path in _datasets(prefix.parent) if path.name.startswith(f"{prefix.name}_")]
    if not near:
        names = {path.name: path for path in _datasets(prefix.parent)}
        near = [names[name] for name in get_close_matches(prefix.name, list(names), _MAX_NAMES, 0.7)]
    if near:
        return f"did you mean {_list(near)}?"
    if not prefix.parent.is_dir():
        return f"there is no folder {prefix.parent}"
    others = _datasets(prefix.parent)
    return f"datasets in {prefix.parent}: {_list(others)}" if others else ""


def _datasets(folder: Path) -> list[Path]:
    """Return the prefixes of the datasets in a folder, sorted by name."""
    try:
        return sorted(path.with_suffix("") for path in folder.iterdir() if path.suffix == ".idx")
    except OSError:
        return []


def _list(paths: list[Path]) -> str:
    more = f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
    return ", ".join(map(str, paths[:_MAX_NAMES])) + more


def _stem(path: Path) -> Path:
    """Return the path without all suffixes: corpus.jsonl.zst is corpus."""
    return path.with_name(path.name.partition(".")[0] or path.name)
