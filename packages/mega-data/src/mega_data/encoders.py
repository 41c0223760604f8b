"""Texts to ids in arrays, by the fastest library whose ids are the tokenizer's own on a sample of the run.

The tokenizer (mega_schema.tokenizer) is the definition. `fastest` lets another library do the work only where
its ids are equal on hard strings and on texts of the very input, and says so in the log where they are not.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import RequestError
from mega_schema.tokenizer import FastTokenizer, Tokenizer
from mega_schema.tokenizer_sentencepiece import SentencePiece

log = logging.getLogger("mega.data")

Flat = tuple[NDArray[Any], NDArray[np.int64]]

WORDS_KEPT = 1 << 20  # of a WordCache: with their ids about 200 MB
LONGEST_KEPT = 64  # characters: longer ones come once

_ASCII_RUNS = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]").findall

# What libraries have disagreed on: spaces, contractions, digits and marks of many scripts, text that looks
# like a special token, characters that join.
TRAPS = (
    "",
    " ",
    "\n",
    "  two  spaces   three \t tab \r\n\r\n end  ",
    "don't DON'T we'LL I'm 've’s 'S 'ſ",
    "<|endoftext|> [MASK] <s> </s> <pad> <unk> ##ing ▁x",
    "1 22 333 4444 55555 3.14159 ٣٤ ½² ⅷ १२३",
    "İstanbul'da ığdır ﬁ ß ẞ Ǆ e\u0301 é ạ̈ \u1e9b\u0323",
    "中文字符，混合English。日本語テキスト 한국어 텍스트 ไทย हिन्दी العربية עברית",
    "🙂👩‍👩‍👧🇹🇷 \u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u0085",
    "\x00\x01\x1c\x1f\x7f\ufffd\U0010ffff\U000e0001",
    "a" * 300 + " " + "=" * 300 + " " + "ab" * 60,
    "http://example.org/a?b=c&d=%20#e --flag=x_y-z ... !!! ?!",
)


class Encode(Protocol):
    """Ids of texts; sent to worker processes."""

    @property
    def name(self) -> str: ...

    def __call__(self, texts: Sequence[str]) -> Flat:
        """The ids of all texts end to end, and how many each has.

        Raises:
            RequestError: one of the texts has no ids.
        """


class Plain:
    """The tokenizer itself."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> Flat:
        documents = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        return np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths


class Pieces:
    """A SentencePiece model by its own library, its ids taken as arrays."""

    name = "sentencepiece"

    def __init__(self, tokenizer: SentencePiece) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> Flat:
        documents = self.tokenizer.encode_arrays(texts)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        return np.concatenate([np.empty(0, np.int32), *documents]), lengths


class Fastokens:
    """Byte-pair encoding by the `fastokens` library: ids come as one buffer, known words are looked up."""

    name = "fastokens"

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self._library = import_module("fastokens._native").Tokenizer.from_json_str(tokenizer.source)
        self._library.no_truncation()

    def __reduce__(self) -> tuple[object, ...]:
        return Fastokens, (self.tokenizer,)

    def __call__(self, texts: Sequence[str]) -> Flat:
        try:
            ids, bounds = self._library.encode_batch_flat(list(texts), False, True)
        except ValueError:
            # a byte that the vocabulary lacks: the definition drops it, this library stops
            return Plain(self.tokenizer)(texts)
        ends = np.frombuffer(bounds, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), ends[1:] - ends[:-1]


class WordCache:
    """WordPiece with a memory of words, exact because BERT's rules never look across a space.

    Normalising, cutting at punctuation and matching pieces all happen between two spaces, so the ids of a
    text are those of its words end to end. In ASCII every mark is a word of its own, so a new word is made of
    runs of letters and marks, most of them known; only what is new among them goes to the tokenizer.
    """

    name = "tokenizers with a cache of words"

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, bytes] = {}  # what stands between two spaces
        self._runs: dict[str, bytes] = {}  # what that is made of
        added = (token["content"] for token in json.loads(tokenizer.source)["added_tokens"])
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")

    def __reduce__(self) -> tuple[object, ...]:
        return WordCache, (self.tokenizer,)

    def __call__(self, texts: Sequence[str]) -> Flat:
        # no other white space is cut at: some of it BERT's rules delete, which joins the words around it
        documents = [text.replace("\n", " ").split(" ") for text in texts]
        for cache in (self._known, self._runs):
            if len(cache) > WORDS_KEPT:
                cache.clear()
        known = self._known
        missing = set().union(*documents).difference(known)
        self._learn(missing)
        joined = [b"".join([known[word] for word in words]) for words in documents]
        for word in missing:
            if len(word) > LONGEST_KEPT:
                del known[word]
        lengths = np.fromiter(map(len, joined), np.int64, len(joined)) // 4
        return np.frombuffer(b"".join(joined), np.int32), lengths

    def _learn(self, words: Iterable[str]) -> None:
        made = {word: self._made_of(word) for word in words}
        runs = self._runs
        missing = list({run for parts in made.values() for run in parts}.difference(runs))
        for run, ids in zip(missing, self.tokenizer.encode_batch(missing), strict=True):
            runs[run] = np.array(ids, np.int32).tobytes()
        for word, parts in made.items():
            self._known[word] = b"".join([runs[part] for part in parts])
        for run in missing:
            if len(run) > LONGEST_KEPT:
                del runs[run]

    def _made_of(self, word: str) -> list[str]:
        if word.isascii() and word.isprintable() and not self._added.search(word):
            return _ASCII_RUNS(word)
        return [word]


def fastest(tokenizer: Tokenizer, sample: Sequence[str]) -> Encode:
    """The fastest way to the tokenizer's ids that gives them on `sample` and on TRAPS.

    The outcome is logged: as a warning where a library was tried whose ids differ.
    """
    if isinstance(tokenizer, SentencePiece):
        return Pieces(tokenizer)
    plain = Plain(tokenizer)
    way = _faster_way(tokenizer)
    if way is None:
        return plain
    try:
        encode = way()
    except (ImportError, ValueError) as error:
        log.warning("encoding with the tokenizers library: a faster one cannot be used (%s)", error)
        return plain
    for text in (*TRAPS, *sample):
        try:
            wanted = tokenizer.encode(text)
        except RequestError:
            continue
        if encode([text])[0].tolist() != wanted:
            log.warning(
                "encoding with the tokenizers library: the ids of %s differ on %r", encode.name, text[:80]
            )
            return plain
    log.info("encoding with %s: ids equal on %d texts", encode.name, len(TRAPS) + len(sample))
    return encode


def _faster_way(tokenizer: Tokenizer) -> Callable[[], Encode] | None:
    if not isinstance(tokenizer, FastTokenizer):
        return None
    content = json.loads(tokenizer.source)
    kind = content["model"].get("type", "BPE")
    if kind == "BPE":
        return lambda: Fastokens(tokenizer)
    cut = (content.get("pre_tokenizer") or {}).get("type")
    rules = (content.get("normalizer") or {"type": None}).get("type")
    if kind == "WordPiece" and cut == "BertPreTokenizer" and rules in (None, "BertNormalizer"):
        looked_for = [t for t in content.get("added_tokens", []) if not t["special"]]
        if any(t["lstrip"] or t["rstrip"] or set(t["content"]) & {" ", "\n"} for t in looked_for):
            return None  # such a token is looked for across spaces too
        return lambda: WordCache(tokenizer)
    return None
