"""Summarize a dataset, and verify all of it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from mega_data.length_histogram import lengths_at_percentiles
from mega_schema.dataset.idx_content import CHUNK, CUT_OFF, check_pointers
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, check_same_tokenizer, open_tokenizer_folder

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_CHUNK_TOKENS = 1 << 22  # checked at a time


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """Counts of a dataset; `lengths` are those of its sequences at PERCENTILES, in tokens."""

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    size: int
    lengths: tuple[int, ...]


def summarize(data: IndexedDataset) -> DatasetSummary:
    """Count documents, sequences and tokens of `data` from its index alone."""
    bounds = data.documents
    empty = sum(
        int(
            (
                bounds[start + 1 : start + 1 + CHUNK]
                == bounds[start : start + CHUNK][: len(bounds) - 1 - start]
            ).sum()
        )
        for start in range(0, len(bounds) - 1, CHUNK)
    )
    return DatasetSummary(
        str(data.dtype),
        len(bounds) - 1,
        empty,
        len(data),
        data.tokens,
        data.tokens * data.dtype.itemsize,
        lengths_at_percentiles(data.lengths, PERCENTILES),
    )


def open_dataset_tokenizer(data: IndexedDataset) -> Tokenizer | None:
    """Open the tokenizer that is stored with the dataset, if there is one.

    Raises:
        FormatError: it is not the one that PREFIX.json names, or its folder is incomplete.
    """
    folder = sibling(data.prefix, ".tokenizer")
    if not folder.exists():
        return None
    tokenizer = open_tokenizer_folder(folder)
    if data.info is not None:
        check_same_tokenizer(data.info.tokenizer, tokenizer.identity, sibling(data.prefix, ".json"))
    return tokenizer


def document_text(data: IndexedDataset, document: int, tokenizer: Tokenizer | None, characters: int) -> str:
    """Return the beginning of a document on one line: its text in quotes, or its ids without a tokenizer."""
    first, last = int(data.documents[document]), int(data.documents[document + 1])
    ids: list[int] = []
    for sequence in range(first, last):
        # a token has at least a byte and a character at most four, so this many tokens are enough
        limit = 4 * characters - len(ids)
        ids += data.read(sequence, 0, min(int(data.lengths[sequence]), limit), copy=True).tolist()
        if len(ids) == 4 * characters:
            break
    if tokenizer is None:
        line = " ".join(map(str, ids))
        return line if len(line) <= characters else line[:characters].rsplit(" ", 1)[0] + " ..."
    text = tokenizer.decode(ids)
    quoted = json.dumps(text[:characters], ensure_ascii=False)
    return quoted if len(text) <= characters else quoted + " ..."


def verify_dataset(data: IndexedDataset, vocab_size: int | None = None) -> int:
    """Check every entry of the index and every token.

    Opening the dataset has already compared the sizes of the files.

    Args:
        vocab_size: upper bound of the ids; None reads it from PREFIX.json, and without that checks no id.

    Returns:
        The vocabulary size that ids were compared with, 0 if they were not.

    Raises:
        FormatError: the first error, with its sequence.
    """
    check_pointers(sibling(data.prefix, ".idx"), data.lengths, data.pointers, data.dtype.itemsize)
    open_dataset_tokenizer(data)
    hint = "--vocab-size of the tokenizer that made the ids, or leave it out" if vocab_size else CUT_OFF
    if vocab_size is None and data.info is not None:
        vocab_size = data.info.tokenizer.vocab_size
    if vocab_size is None or data.dtype.kind not in "iu":
        return 0
    _verify_ids(data, vocab_size, hint)
    return vocab_size


def _verify_ids(data: IndexedDataset, vocab_size: int, hint: str) -> None:
    for start in range(0, data.tokens, _CHUNK_TOKENS):
        ids = data.copy_range(start, min(start + _CHUNK_TOKENS, data.tokens))
        if int(ids.min()) >= 0 and int(ids.max()) < vocab_size:
            continue
        token = start + int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        # the last sequence that begins at or before it: the non-empty one
        i = int(np.searchsorted(data.pointers, token * data.dtype.itemsize, "right")) - 1
        offset = token - int(data.pointers[i]) // data.dtype.itemsize
        path, wanted = sibling(data.prefix, ".bin"), f"0 to {vocab_size - 1}, the vocabulary"
        what, found = f"token {offset} of sequence {i}", int(ids[token - start])
        raise FormatError(path, what, found=found, wanted=wanted, hint=hint)
