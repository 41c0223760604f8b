"""Encode texts to arrays of ids with the tokenizer or a faster library.

The tokenizer (mega_schema.tokenizer.tokenizer) is the reference. `mega_data.fastest_encoder` decides which of
the others may replace it.
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

MAX_CACHED_WORDS = 1 << 20  # of a CachedWordPieceEncoder: with their ids about 200 MB
MAX_CACHED_CHARACTERS = 64  # per word: longer ones rarely repeat
MAX_LIBRARY_BYTES = 128 << 20  # of memory for the words that Gigatoken remembers, about a million
MEMORY_CHECK_BYTES = 4 << 20  # of text between two checks of that memory, which grows by 40 MB at most
# Between two texts of one call. It begins and ends with characters that it has nowhere else, so a match never
# spans a text's end and the separator's beginning.
_SEPARATOR: Final = "\x00mega-data: the end of a text\x01"
_SEPARATOR_BYTES: Final = _SEPARATOR.encode()

_ASCII_RUNS = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]").findall


class TextEncoder(Protocol):
    """A function from texts to ids; sent to worker processes."""

    @property
    def name(self) -> str: ...

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        """Return the concatenated ids of all texts, and the length of each.

        Args:
            eod: id to append to each text that has any.

        Raises:
            RequestError: one of the texts cannot be encoded.
        """


def _append_eod(ids: NDArray[Any], lengths: NDArray[np.int64], eod: int | None) -> FlatIds:
    """Append `eod` to the ids of each text that has any."""
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
    """Encode with the tokenizer itself."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        documents = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        ids = np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum()))
        return _append_eod(ids, lengths, eod)


class SentencePieceEncoder:
    """Encode with the SentencePiece library, which returns arrays."""

    name = "sentencepiece"

    def __init__(self, tokenizer: SentencePiece) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        documents = self.tokenizer.encode_arrays(texts)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        return _append_eod(np.concatenate([np.empty(0, np.int32), *documents]), lengths, eod)


class GigatokenEncoder:
    """Encode byte pairs with the `gigatoken` library, all texts of a call as one.

    Each call of the library costs microseconds, so the texts are joined by a separator, an added token whose
    id no text has. The eod of a text overwrites its separator. The library remembers every word: when the
    words take more than MAX_LIBRARY_BYTES, it is reopened.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: FastTokenizer, source: bytes) -> None:
        """Store the tokenizer; the first call, or unpickling in another process, opens the library.

        Args:
            source: text of the tokenizer.json, from `from_content`.
        """
        self.tokenizer = tokenizer
        self.source = source
        self.separator_id = tokenizer.identity.vocab_size
        self._library: Any = None

    @classmethod
    def from_content(cls, tokenizer: FastTokenizer, content: Mapping[str, Any]) -> GigatokenEncoder:
        """Build an encoder for a tokenizer.json; special tokens are not searched for in text."""
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
            ImportError: the library is not installed.
            RuntimeError: the library does not support the tokenizer.
            OSError: the system does not report the memory of a process, so the cache could not be bounded.
        """
        self._library = None  # free the old one first
        self._library = import_module("gigatoken.gigatoken_rs").load_hf_json(self.source)
        self._max_resident = _resident_bytes() + MAX_LIBRARY_BYTES
        self._unchecked_bytes = 0

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        if self._library is None:
            self._open()
        try:
            joined_texts = _SEPARATOR_BYTES.join([*map(str.encode, texts), b""])
        except UnicodeEncodeError:
            return ReferenceEncoder(self.tokenizer)(texts, eod)  # raises an error with the text
        ids = self._library.encode(joined_texts)
        self._unchecked_bytes += len(joined_texts)
        if self._unchecked_bytes > MEMORY_CHECK_BYTES:
            self._unchecked_bytes = 0
            if _resident_bytes() > self._max_resident:
                self._open()
        ends = np.flatnonzero(ids == self.separator_id)
        if len(ends) != len(texts):
            return ReferenceEncoder(self.tokenizer)(texts, eod)  # a text contains the separator
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
    """Return the resident memory of this process in bytes.

    Raises:
        OSError: the system, such as macOS, does not report it.
    """
    pages = Path("/proc/self/statm").read_bytes().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class FastokensEncoder:
    """Encode byte pairs with the `fastokens` library, which caches words and returns one buffer."""

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
            # a byte that the vocabulary lacks: the tokenizer drops it, this library fails
            return ReferenceEncoder(self.tokenizer)(texts, eod)
        ends = np.frombuffer(bounds, np.uint64).astype(np.int64)
        return _append_eod(np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1], eod)


class CachedWordPieceEncoder:
    """Encode WordPiece with a cache of words; exact because BERT's rules never look across a space.

    Normalization, splitting at punctuation and matching of pieces all happen between two spaces, so the ids
    of a text are those of its words end to end. In ASCII every punctuation mark is a word, so a new word
    consists of runs of letters and marks, most of them cached. Only new runs are encoded by the tokenizer.
    """

    name = "tokenizers with a cache of words"

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self._word_ids: dict[str, bytes] = {}  # text between two spaces
        self._run_ids: dict[str, bytes] = {}  # parts of that text
        added = (token["content"] for token in json.loads(tokenizer.source)["added_tokens"])
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")

    def __reduce__(self) -> tuple[object, ...]:
        return CachedWordPieceEncoder, (self.tokenizer,)

    def __call__(self, texts: Sequence[str], eod: int | None = None) -> FlatIds:
        # not split at other white space: BERT's rules delete some of it, which joins the words around it
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
