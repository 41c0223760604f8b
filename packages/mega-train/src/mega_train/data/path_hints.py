"""Suggest a --data-path if the given one does not exist."""

from __future__ import annotations

from pathlib import Path

from mega_schema.app import path_hints
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import FormatError
from mega_schema.remote_files import is_remote


def open_dataset(prefix: Path, cache: Path | None = None) -> IndexedDataset:
    """Open the dataset, or raise an error with a similar path as its hint.

    Args:
        cache: folder for the parts of remote datasets that were read.

    Raises:
        FormatError: it is missing, cut off or of another format.
        MegaError: the place of a remote dataset cannot be reached, or the cache cannot be written.
    """
    if is_remote(prefix):
        return IndexedDataset(prefix, cache=cache)
    if not prefix.name:  # "." and "/"
        raise FormatError(prefix, "is a folder, not the prefix of a dataset", hint=suggest(prefix))
    try:
        return IndexedDataset(prefix)
    except FormatError as error:
        if error.hint or sibling(prefix, ".idx").is_file() or not (hint := suggest(prefix)):
            raise
        raise FormatError(error.where, error.what, hint=hint) from None


def suggest(prefix: Path) -> str:
    """Suggest a prefix similar to one that has no index; empty if nothing is similar."""
    return path_hints.suggest_dataset(prefix, "--data-path")
