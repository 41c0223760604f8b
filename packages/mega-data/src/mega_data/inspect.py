"""What is in a dataset, and whether all of it is as it should be."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from mega_data.length_histogram import at_percentiles
from mega_schema.dataset.idx_content import CHUNK, CUT_OFF, check_pointers
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, check_same_tokenizer, open_tokenizer_folder

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_AT_A_TIME = 1 << 22  # tokens looked at together


@dataclass(frozen=True, slots=True)
class Contents:
    """Counts of a dataset; `lengths` are those of its sequences at PERCENTILES, in tokens."""

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    size: int
    lengths: tuple[int, ...]


def contents(data: IndexedDataset) -> Contents:
    """Counts of `data`, from its index alone."""
    bounds = data.documents
    empty = sum(
        int((bounds[at + 1 : at + 1 + CHUNK] == bounds[at : at + CHUNK][: len(bounds) - 1 - at]).sum())
        for at in range(0, len(bounds) - 1, CHUNK)
    )
    return Contents(
        str(data.dtype),
        len(bounds) - 1,
        empty,
        len(data),
        data.tokens,
        data.tokens * data.dtype.itemsize,
        at_percentiles(data.lengths, PERCENTILES),
    )


def opened_tokenizer(data: IndexedDataset) -> Tokenizer | None:
    """The tokenizer that lies beside the dataset, if one does.

    Raises:
        FormatError: it is not the one that PREFIX.json names, or its folder is not whole.
    """
    folder = sibling(data.prefix, ".tokenizer")
    if not folder.exists():
        return None
    tokenizer = open_tokenizer_folder(folder)
    if data.info is not None:
        check_same_tokenizer(data.info.tokenizer, tokenizer.identity, sibling(data.prefix, ".json"))
    return tokenizer


def document_text(data: IndexedDataset, document: int, tokenizer: Tokenizer | None, characters: int) -> str:
    """The beginning of a document on one line: its text in quotes, or its ids without a tokenizer."""
    first, last = int(data.documents[document]), int(data.documents[document + 1])
    ids: list[int] = []
    for sequence in range(first, last):
        # a token is a byte at least and a character four at most, so this many tokens are enough to see
        room = 4 * characters - len(ids)
        ids += data.read(sequence, 0, min(int(data.lengths[sequence]), room), copy=True).tolist()
        if len(ids) == 4 * characters:
            break
    if tokenizer is None:
        line = " ".join(map(str, ids))
        return line if len(line) <= characters else line[:characters].rsplit(" ", 1)[0] + " ..."
    text = tokenizer.decode(ids)
    shown = json.dumps(text[:characters], ensure_ascii=False)
    return shown if len(text) <= characters else shown + " ..."


def verify(data: IndexedDataset, vocab_size: int | None = None) -> int:
    """Look at every entry of the index and every token.

    Opening has already compared the sizes of the files; this finds what sizes cannot tell.

    Args:
        vocab_size: what ids must be below; None takes it from PREFIX.json, and without that looks at no id.

    Returns:
        The vocabulary size that ids were compared with, 0 where they were not.

    Raises:
        FormatError: the first fault, with the sequence it is in.
    """
    check_pointers(sibling(data.prefix, ".idx"), data.lengths, data.pointers, data.dtype.itemsize)
    opened_tokenizer(data)
    hint = "--vocab-size of the tokenizer that made the ids, or leave it out" if vocab_size else CUT_OFF
    if vocab_size is None and data.info is not None:
        vocab_size = data.info.tokenizer.vocab_size
    if vocab_size is None or data.dtype.kind not in "iu":
        return 0
    _verify_ids(data, vocab_size, hint)
    return vocab_size


def _verify_ids(data: IndexedDataset, vocab_size: int, hint: str) -> None:
    for at in range(0, data.tokens, _AT_A_TIME):
        part = data.copy_range(at, min(at + _AT_A_TIME, data.tokens))
        if int(part.min()) >= 0 and int(part.max()) < vocab_size:
            continue
        place = at + int(np.flatnonzero((part < 0) | (part >= vocab_size))[0])
        # the last sequence that begins at or before it, which is the one that is not empty
        i = int(np.searchsorted(data.pointers, place * data.dtype.itemsize, "right")) - 1
        offset = place - int(data.pointers[i]) // data.dtype.itemsize
        path, wanted = sibling(data.prefix, ".bin"), f"0 to {vocab_size - 1}, the vocabulary"
        what, found = f"token {offset} of sequence {i}", int(part[place - at])
        raise FormatError(path, what, found=found, wanted=wanted, hint=hint)
