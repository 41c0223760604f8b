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

from mega_data.encoders import (
    CachedWordPieceEncoder,
    FastokensEncoder,
    FlatIds,
    GigatokenEncoder,
    ReferenceEncoder,
    SentencePieceEncoder,
    TextEncoder,
)
from mega_schema.errors import RequestError
from mega_schema.tokenizer.sentencepiece import SentencePiece
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

log = logging.getLogger("mega.data")

UNUSABLE_ERRORS: Final = (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
)  # of a library: to be opened, or to encode
_MAX_ADDED_TRIED = 64  # added tokens that are looked for in a text before a library is trusted

# What libraries have disagreed on: spaces, contractions, digits and marks of many scripts, text that looks
# like a special token, characters that join.
HARD_TEXTS = (
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


class EncoderTrial:
    """Where encoders show their ids: here, or where they will work."""

    def prepare(self, encode: TextEncoder) -> None:
        """It is asked soon, unless it cannot be used."""

    def encode(self, encode: TextEncoder, texts: Sequence[str]) -> FlatIds:
        """Of the texts, in one call."""
        return encode(texts)


class _Candidate:
    def __init__(self, name: str, make: Callable[[], TextEncoder]) -> None:
        self.name, self._make = name, make

    @cached_property
    def encode(self) -> TextEncoder:
        """The encoder, opened when it is first asked for; or one of CANNOT."""
        return self._make()


def find_fastest_encoder(tokenizer: Tokenizer, sample: Sequence[str]) -> TextEncoder:
    """What a search of this process finds."""
    return EncoderSearch(tokenizer, EncoderTrial()).find(sample)


class EncoderSearch:
    """The fastest way to a tokenizer's ids; what is likely to be that is made ready at once."""

    def __init__(self, tokenizer: Tokenizer, trial: EncoderTrial) -> None:
        self._tokenizer, self._trial = tokenizer, trial
        self._candidates, self._hard_texts = list[_Candidate](), list(HARD_TEXTS)
        if isinstance(tokenizer, FastTokenizer):
            content = tokenizer.content()
            self._candidates = [
                _Candidate(*candidate) for candidate in _candidate_encoders(tokenizer, content)
            ]
            self._hard_texts += _texts_with_added_tokens(content)
        with suppress(*UNUSABLE_ERRORS):  # which it does again, and then it is said
            for candidate in self._candidates[:1]:
                trial.prepare(candidate.encode)

    def find(self, sample: Sequence[str]) -> TextEncoder:
        """The first whose ids are the tokenizer's on `sample`, on TRAPS and around its added tokens.

        The outcome is logged: as a warning that says why, where a faster library was tried.
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, SentencePiece):
            return SentencePieceEncoder(tokenizer)
        if not isinstance(tokenizer, FastTokenizer):
            return ReferenceEncoder(tokenizer)
        texts, wanted = self._reference_ids(tokenizer, sample)
        encoder: TextEncoder = ReferenceEncoder(tokenizer)
        reasons = list[str]()
        for candidate in self._candidates:
            try:
                encode = candidate.encode
                difference = _first_difference(self._trial.encode(encode, texts), texts, wanted)
            except UNUSABLE_ERRORS as error:
                reasons.append(f"{candidate.name} cannot be used ({str(error).partition(chr(10))[0]})")
                continue
            if difference is None:
                encoder = encode
                break
            reasons.append(f"the ids of {candidate.name} differ on {difference[:80]!r}")
        if reasons:
            log.warning("encoding with %s: %s", encoder.name, "; ".join(reasons))
        else:
            log.info("encoding with %s: ids equal on %d texts", encoder.name, len(texts))
        return encoder

    def _reference_ids(
        self, tokenizer: FastTokenizer, sample: Sequence[str]
    ) -> tuple[list[str], list[list[int]]]:
        """The texts that have ids, and these."""
        texts, wanted = list[str](), list[list[int]]()
        for text in (*self._hard_texts, *sample):
            try:
                wanted.append(tokenizer.encode(text))
            except RequestError:
                continue
            texts.append(text)
        return texts, wanted


def _first_difference(encoded: FlatIds, texts: Sequence[str], wanted: Sequence[list[int]]) -> str | None:
    """The first of the texts whose ids are not the wanted ones."""
    ids, lengths = encoded
    ends = np.cumsum(lengths)
    for text, wanted_ids, end, length in zip(texts, wanted, ends, lengths, strict=True):
        if ids[end - length : end].tolist() != wanted_ids:
            return text
    return None


def _texts_with_added_tokens(content: Mapping[str, Any]) -> list[str]:
    """Texts with the tokenizer's added tokens within words, between spaces and side by side."""
    added = [token["content"] for token in content.get("added_tokens", [])][:_MAX_ADDED_TRIED]
    return [f"a{token}b {token} {token}{token}\n" for token in added]


def _candidate_encoders(
    tokenizer: FastTokenizer, content: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], TextEncoder]]]:
    """Names of libraries that may encode, the fastest first, and what opens them."""
    kind = content["model"].get("type", "BPE")
    if kind == "BPE":
        if _gigatoken_supports(content):
            yield GigatokenEncoder.name, partial(GigatokenEncoder.from_content, tokenizer, content)
        yield FastokensEncoder.name, partial(FastokensEncoder, tokenizer)
    pre_tokenizer = (content.get("pre_tokenizer") or {}).get("type")
    normalizer = (content.get("normalizer") or {"type": None}).get("type")
    if kind == "WordPiece" and pre_tokenizer == "BertPreTokenizer" and normalizer in (None, "BertNormalizer"):
        searched_tokens = [t for t in content.get("added_tokens", []) if not t["special"]]
        # such a token is looked for across spaces too
        if not any(t["lstrip"] or t["rstrip"] or set(t["content"]) & {" ", "\n"} for t in searched_tokens):
            yield CachedWordPieceEncoder.name, partial(CachedWordPieceEncoder, tokenizer)


def _gigatoken_supports(content: Mapping[str, Any]) -> bool:
    """Whether gigatoken follows all that decides ids; it refuses most of what it lacks, but not all.

    It cuts words as GPT-2 where a ByteLevel says not to, or where nothing cuts; takes each Split for an
    isolating one; drops no merges at random; and of two equal merges takes the first, not the last.
    """
    model, pre_tokenizer = content["model"], content.get("pre_tokenizer") or {}
    merges = model.get("merges", [])
    if model.get("dropout") or len(set(map(" ".join, merges))) < len(merges):
        return False
    if model.get("byte_fallback"):
        return True  # of such models it refuses every part that it does not follow
    *splits, level = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    all_isolated = all(
        part.get("type") == "Split" and part["behavior"] == "Isolated" and not part["invert"]
        for part in splits
    )
    adds_prefix_space = bool(splits) and level.get("add_prefix_space", False)
    splits_words_once = bool(splits) != level.get("use_regex", True)  # one of the two cuts them
    return level.get("type") == "ByteLevel" and all_isolated and splits_words_once and not adds_prefix_space
