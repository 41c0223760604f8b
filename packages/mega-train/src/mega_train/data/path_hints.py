"""Suggest what a person meant by a --data-path where no dataset is."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from mega_schema.errors import FormatError
from mega_schema.indexed import IndexedDataset, beside

_MOST = 3  # datasets that a hint names


def open_dataset(prefix: Path) -> IndexedDataset:
    """The dataset, or an error that says what lies near the path.

    Raises:
        FormatError: it is missing, cut off or of another format.
    """
    try:
        return IndexedDataset(prefix)
    except FormatError as error:
        if error.hint or beside(prefix, ".idx").is_file() or not (hint := suggest(prefix)):
            raise
        raise FormatError(error.where, error.what, hint=hint) from None


def suggest(prefix: Path) -> str:
    """A hint for a prefix without an index; empty where nothing is near."""
    if prefix.is_file():
        stem = _stem(prefix)
        return (
            f"{prefix} is a file, not the prefix of a dataset: mega-data preprocess --input {prefix} "
            f"--output-prefix {stem} --tokenizer-type TYPE, then --data-path {stem}_text_document"
        )
    if prefix.is_dir():
        inside = _datasets(prefix)
        if inside:
            return f"datasets in this folder: {_list(inside)}"
        return "a folder without datasets; mega-data preprocess makes one of text"
    near = [path for path in _datasets(prefix.parent) if path.name.startswith(f"{prefix.name}_")]
    if not near:
        names = {path.name: path for path in _datasets(prefix.parent)}
        near = [names[name] for name in get_close_matches(prefix.name, list(names), _MOST, 0.7)]
    return f"did you mean {_list(near)}?" if near else ""


def _datasets(folder: Path) -> list[Path]:
    """Prefixes of the datasets in a folder, by name."""
    try:
        return sorted(path.with_suffix("") for path in folder.iterdir() if path.suffix == ".idx")
    except OSError:
        return []


def _list(paths: list[Path]) -> str:
    more = f" and {len(paths) - _MOST} more" if len(paths) > _MOST else ""
    return ", ".join(map(str, paths[:_MOST])) + more


def _stem(path: Path) -> Path:
    """The path without the endings of its name: corpus.jsonl.zst is corpus."""
    return path.with_name(path.name.partition(".")[0] or path.name)
