"""Suggest what a person meant by a --data-path where no dataset is."""

from __future__ import annotations

from pathlib import Path

from mega_schema.app import path_hints
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import FormatError


def open_dataset(prefix: Path) -> IndexedDataset:
    """The dataset, or an error that says what lies near the path.

    Raises:
        FormatError: it is missing, cut off or of another format.
    """
    if not prefix.name:  # "." and "/"
        raise FormatError(prefix, "is a folder, not the prefix of a dataset", hint=suggest(prefix))
    try:
        return IndexedDataset(prefix)
    except FormatError as error:
        if error.hint or sibling(prefix, ".idx").is_file() or not (hint := suggest(prefix)):
            raise
        raise FormatError(error.where, error.what, hint=hint) from None


def suggest(prefix: Path) -> str:
    """A hint for a prefix without an index; empty where nothing is near."""
    return path_hints.suggest_dataset(prefix, "--data-path")
