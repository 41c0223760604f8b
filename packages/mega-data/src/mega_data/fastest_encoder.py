"""The fastest library whose ids are the tokenizer's own on a sample of the run.

Another library than the tokenizer's does the work only where its ids are equal on hard strings and on texts
of the very input; where they are not, the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final

import numpy as np

from mega_data.encoders import Encode, Fastokens, Flat, Gigatoken, Pieces, Plain, WordCache
from mega_schema.errors import RequestError
from mega_schema.tokenizer.sentencepiece import SentencePiece
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

log = logging.getLogger("mega.data")

CANNOT: Final = (ImportError, OSError, RuntimeError, ValueError)  # of a library: to be opened, or to encode
_ADDED_TRIED = 64  # added tokens that are looked for in a text before a library is trusted

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


class Trial:
    """Where encoders show their ids: here, or where they will work."""

    def ready(self, encode: Encode) -> None:
        """It is asked soon, unless it cannot be used."""

    def ids(self, encode: Encode, texts: Sequence[str]) -> Flat:
        """Of the texts, in one call."""
        return encode(texts)


class _Candidate:
    def __init__(self, name: str, make: Callable[[], Encode]) -> None:
        self.name, self._make = name, make

    @cached_property
    def encode(self) -> Encode:
        """The encoder, opened when it is first asked for; or one of CANNOT."""
        return self._make()


def fastest(tokenizer: Tokenizer, sample: Sequence[str]) -> Encode:
    """What a search of this process finds."""
    return Search(tokenizer, Trial()).found(sample)


class Search:
    """The fastest way to a tokenizer's ids; what is likely to be that is made ready at once."""

    def __init__(self, tokenizer: Tokenizer, trial: Trial) -> None:
        self._tokenizer, self._trial = tokenizer, trial
        self._candidates, self._traps = list[_Candidate](), list(TRAPS)
        if isinstance(tokenizer, FastTokenizer):
            content = tokenizer.content()
            self._candidates = [_Candidate(*way) for way in _faster_ways(tokenizer, content)]
            self._traps += _with_added(content)
        with suppress(*CANNOT):  # which it does again, and then it is said
            for first in self._candidates[:1]:
                trial.ready(first.encode)

    def found(self, sample: Sequence[str]) -> Encode:
        """The first whose ids are the tokenizer's on `sample`, on TRAPS and around its added tokens.

        The outcome is logged: as a warning that says why, where a faster library was tried.
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, SentencePiece):
            return Pieces(tokenizer)
        if not isinstance(tokenizer, FastTokenizer):
            return Plain(tokenizer)
        texts, wanted = self._wanted(tokenizer, sample)
        chosen: Encode = Plain(tokenizer)
        reasons = list[str]()
        for candidate in self._candidates:
            try:
                encode = candidate.encode
                differs = _first_difference(self._trial.ids(encode, texts), texts, wanted)
            except CANNOT as error:
                reasons.append(f"{candidate.name} cannot be used ({str(error).partition(chr(10))[0]})")
                continue
            if differs is None:
                chosen = encode
                break
            reasons.append(f"the ids of {candidate.name} differ on {differs[:80]!r}")
        if reasons:
            log.warning("encoding with %s: %s", chosen.name, "; ".join(reasons))
        else:
            log.info("encoding with %s: ids equal on %d texts", chosen.name, len(texts))
        return chosen

    def _wanted(self, tokenizer: FastTokenizer, sample: Sequence[str]) -> tuple[list[str], list[list[int]]]:
        """The texts that have ids, and these."""
        texts, wanted = list[str](), list[list[int]]()
        for text in (*self._traps, *sample):
            try:
                wanted.append(tokenizer.encode(text))
            except RequestError:
                continue
            texts.append(text)
        return texts, wanted


def _first_difference(found: Flat, texts: Sequence[str], wanted: Sequence[list[int]]) -> str | None:
    """The first of the texts whose ids are not the wanted ones."""
    ids, lengths = found
    ends = np.cumsum(lengths)
    for text, want, end, length in zip(texts, wanted, ends, lengths, strict=True):
        if ids[end - length : end].tolist() != want:
            return text
    return None


def _with_added(content: Mapping[str, Any]) -> list[str]:
    """Texts with the tokenizer's added tokens within words, between spaces and side by side."""
    added = [token["content"] for token in content.get("added_tokens", [])][:_ADDED_TRIED]
    return [f"a{token}b {token} {token}{token}\n" for token in added]


def _faster_ways(
    tokenizer: FastTokenizer, content: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], Encode]]]:
    """Names of libraries that may encode, the fastest first, and what opens them."""
    kind = content["model"].get("type", "BPE")
    if kind == "BPE":
        if _all_of_it_counts(content):
            yield Gigatoken.name, partial(Gigatoken.of, tokenizer, content)
        yield Fastokens.name, partial(Fastokens, tokenizer)
    cut = (content.get("pre_tokenizer") or {}).get("type")
    rules = (content.get("normalizer") or {"type": None}).get("type")
    if kind == "WordPiece" and cut == "BertPreTokenizer" and rules in (None, "BertNormalizer"):
        looked_for = [t for t in content.get("added_tokens", []) if not t["special"]]
        # such a token is looked for across spaces too
        if not any(t["lstrip"] or t["rstrip"] or set(t["content"]) & {" ", "\n"} for t in looked_for):
            yield WordCache.name, partial(WordCache, tokenizer)


def _all_of_it_counts(content: Mapping[str, Any]) -> bool:
    """Whether gigatoken follows all that decides ids; it refuses most of what it lacks, but not all.

    It cuts words as GPT-2 where a ByteLevel says not to, or where nothing cuts; takes each Split for an
    isolating one; drops no merges at random; and of two equal merges takes the first, not the last.
    """
    model, cut = content["model"], content.get("pre_tokenizer") or {}
    merges = model.get("merges", [])
    if model.get("dropout") or len(set(map(" ".join, merges))) < len(merges):
        return False
    if model.get("byte_fallback"):
        return True  # of such models it refuses every part that it does not follow
    *splits, level = cut.get("pretokenizers") or [cut]
    isolating = all(
        part.get("type") == "Split" and part["behavior"] == "Isolated" and not part["invert"]
        for part in splits
    )
    prefixed = bool(splits) and level.get("add_prefix_space", False)
    words = bool(splits) != level.get("use_regex", True)  # one of the two cuts them
    return level.get("type") == "ByteLevel" and isolating and words and not prefixed
