"""Texts to ids in arrays: the tokenizer itself, and libraries that are faster.

The tokenizer (mega_schema.tokenizer.tokenizer) is the definition. Which of the others may do its work,
`mega_data.fastest_encoder` decides.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from mega_schema.tokenizer.sentencepiece import SentencePiece
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

FlatIds = tuple[NDArray[Any], NDArray[np.int64]]

MAX_CACHED_WORDS = 1 << 20  # of a WordCache: with their ids about 200 MB
MAX_CACHED_CHARACTERS = 64  # characters: longer ones come once
MAX_LIBRARY_BYTES = 128 << 20  # of memory for the words that Gigatoken has seen, about a million
MEMORY_CHECK_BYTES = 4 << 20  # of text between two looks at it; they grow it by 40 MB at most
# Between two texts of one call. It begins and ends with letters that it has nowhere else, so what is found of
# it is never a text's end and its own beginning.
_SEPARATOR: Final = "\x00mega-data: the end of a text\x01"
_SEPARATOR_BYTES: Final = _SEPARATOR.encode()

_ASCII_RUNS = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]").findall


class TextEncoder(Protocol):
    """Ids of texts; sent to worker processes."""

    @property
    def name(self) -> str: ...

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        """The ids of all texts end to end, and how many each has.

        Args:
            eod: id to end each text with that has any.

        Raises:
            RequestError: one of the texts has no ids.
        """


def _append_eod(ids: NDArray[Any], lengths: NDArray[np.int64], eod: int | None) -> FlatIds:
    """Ids of texts, with `eod` after those of each text that has any."""
    if eod is None:
        return ids, lengths
    out_lengths = lengths + (lengths > 0)
    eod_places = (np.cumsum(out_lengths) - 1)[lengths > 0]
    out = np.empty(int(out_lengths.sum()), ids.dtype)
    is_text = np.ones(len(out), np.bool_)
    out[eod_places], is_text[eod_places] = eod, False
    out[is_text] = ids
    return out, out_lengths


class ReferenceEncoder:
    """The tokenizer itself."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        documents = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        ids = np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum()))
        return _append_eod(ids, lengths, eod)


class SentencePieceEncoder:
    """A SentencePiece model by its own library, its ids taken as arrays."""

    name = "sentencepiece"

    def __init__(self, tokenizer: SentencePiece) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        documents = self.tokenizer.encode_arrays(texts)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        return _append_eod(np.concatenate([np.empty(0, np.int32), *documents]), lengths, eod)


class GigatokenEncoder:
    """Byte-pair encoding by the `gigatoken` library, the texts of a call as one.

    A call costs that library microseconds, so the texts are joined with a mark between them, an added token
    of an id that no text has; where a text ends, its eod is written over the mark. The library remembers
    every word it has seen: when they take more than WORDS_BYTES it is opened again, and knows none.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: FastTokenizer, source: bytes) -> None:
        """The library is opened by the first call, or where this was sent.

        Args:
            source: of the tokenizer, as `of` makes it.
        """
        self.tokenizer, self.source, self.separator_id = tokenizer, source, tokenizer.identity.vocab_size
        self._library: Any = None

    @classmethod
    def from_content(cls, tokenizer: FastTokenizer, content: Mapping[str, Any]) -> GigatokenEncoder:
        """For a tokenizer whose tokenizer.json holds `content`. Special tokens are not looked for in text."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        mark = {"id": tokenizer.identity.vocab_size, "content": _SEPARATOR, "special": True, **flags}
        added = [token for token in content.get("added_tokens", []) if not token["special"]]
        disabled = dict.fromkeys(("truncation", "padding", "post_processor"))
        return cls(tokenizer, orjson.dumps({**content, **disabled, "added_tokens": [*added, mark]}))

    def __reduce__(self) -> tuple[object, ...]:
        return GigatokenEncoder._open_received, (self.tokenizer, self.source)

    @classmethod
    def _open_received(cls, tokenizer: FastTokenizer, source: bytes) -> GigatokenEncoder:
        encode = cls(tokenizer, source)
        encode._open()
        return encode

    def _open(self) -> None:
        """Open the library.

        Raises:
            ImportError: it is not installed.
            RuntimeError: it cannot do what the tokenizer does.
            OSError: the system does not tell how much memory a process holds, so nothing would bound it.
        """
        self._library = None  # the memory of the one before is free first
        self._library = import_module("gigatoken.gigatoken_rs").load_hf_json(self.source)
        self._max_resident, self._unchecked_bytes = _resident_bytes() + MAX_LIBRARY_BYTES, 0

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        if self._library is None:
            self._open()
        try:
            joined_texts = _SEPARATOR_BYTES.join([*map(str.encode, texts), b""])
        except UnicodeEncodeError:
            return ReferenceEncoder(self.tokenizer)(texts, eod)  # it says what is wrong with which text
        ids = self._library.encode(joined_texts)
        self._unchecked_bytes += len(joined_texts)
        if self._unchecked_bytes > MEMORY_CHECK_BYTES:
            self._unchecked_bytes = 0
            if _resident_bytes() > self._max_resident:
                self._open()
        ends = np.flatnonzero(ids == self.separator_id)
        if len(ends) != len(texts):
            return ReferenceEncoder(self.tokenizer)(texts, eod)  # somebody wrote the mark into a text
        lengths = np.diff(ends, prepend=-1) - 1
        if eod is None:
            return ids[ids != self.separator_id], lengths
        ids[ends] = eod
        has_tokens = lengths > 0
        if not has_tokens.all():
            is_kept = np.ones(len(ids), np.bool_)
            is_kept[ends[~has_tokens]] = False
            ids = ids[is_kept]
        return ids, lengths + has_tokens


def _resident_bytes() -> int:
    """Bytes of memory that this process holds.

    Raises:
        OSError: the system does not tell, as macOS.
    """
    pages = Path("/proc/self/statm").read_bytes().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class FastokensEncoder:
    """Byte-pair encoding by the `fastokens` library: ids come as one buffer, known words are looked up."""

    name = "fastokens"

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self._library = import_module("fastokens._native").Tokenizer.from_json_str(tokenizer.source)
        self._library.no_truncation()

    def __reduce__(self) -> tuple[object, ...]:
        return FastokensEncoder, (self.tokenizer,)

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        try:
            ids, bounds = self._library.encode_batch_flat(list(texts), False, True)
        except ValueError:
            # a byte that the vocabulary lacks: the definition drops it, this library stops
            return ReferenceEncoder(self.tokenizer)(texts, eod)
        ends = np.frombuffer(bounds, np.uint64).astype(np.int64)
        return _append_eod(np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1], eod)


class CachedWordPieceEncoder:
    """WordPiece with a memory of words, exact because BERT's rules never look across a space.

    Normalising, cutting at punctuation and matching pieces all happen between two spaces, so the ids of a
    text are those of its words end to end. In ASCII every mark is a word of its own, so a new word is made of
    runs of letters and marks, most of them known; only what is new among them goes to the tokenizer.
    """

    name = "tokenizers with a cache of words"

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self._word_ids: dict[str, bytes] = {}  # what stands between two spaces
        self._run_ids: dict[str, bytes] = {}  # what that is made of
        added = (token["content"] for token in json.loads(tokenizer.source)["added_tokens"])
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")

    def __reduce__(self) -> tuple[object, ...]:
        return CachedWordPieceEncoder, (self.tokenizer,)

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        # no other white space is cut at: some of it BERT's rules delete, which joins the words around it
        documents = [text.replace("\n", " ").split(" ") for text in texts]
        for cache in (self._word_ids, self._run_ids):
            if len(cache) > MAX_CACHED_WORDS:
                cache.clear()
        known = self._word_ids
        missing = set().union(*documents).difference(known)
        self._encode_words(missing)
        encoded = [b"".join([known[word] for word in words]) for words in documents]
        for word in missing:
            if len(word) > MAX_CACHED_CHARACTERS:
                del known[word]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // 4
        return _append_eod(np.frombuffer(b"".join(encoded), np.int32), lengths, eod)

    def _encode_words(self, words: Iterable[str]) -> None:
        runs_of_word = {word: self._split_runs(word) for word in words}
        runs = self._run_ids
        missing = list({run for parts in runs_of_word.values() for run in parts}.difference(runs))
        for run, ids in zip(missing, self.tokenizer.encode_batch(missing), strict=True):
            runs[run] = np.array(ids, np.int32).tobytes()
        for word, parts in runs_of_word.items():
            self._word_ids[word] = b"".join([runs[part] for part in parts])
        for run in missing:
            if len(run) > MAX_CACHED_CHARACTERS:
                del runs[run]

    def _split_runs(self, word: str) -> list[str]:
        if word.isascii() and word.isprintable() and not self._added.search(word):
            return _ASCII_RUNS(word)
        return [word]
