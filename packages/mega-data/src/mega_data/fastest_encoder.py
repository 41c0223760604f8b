"""Choose the fastest library whose ids equal the tokenizer's on a sample of the run.

A faster library is used only if its ids equal the tokenizer's on hard strings and on texts of the input. If
they differ, the log reports it.
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

# of a library that cannot be opened, or cannot encode
UNUSABLE_ERRORS: Final = (ImportError, OSError, RuntimeError, ValueError)
_MAX_ADDED_TRIED = 64  # added tokens on which a library is tested

# Texts on which libraries have disagreed: spaces, contractions, digits and marks of many scripts, text that
# looks like a special token, combining characters.
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
    """The process in which encoders are tried: this one, or the one in which they will run."""

    def prepare(self, encoder: TextEncoder) -> None:
        """Prepare an encoder that will be tried soon."""

    def encode(self, encoder: TextEncoder, texts: Sequence[str]) -> FlatIds:
        """Encode the texts in one call."""
        return encoder(texts)


class _Candidate:
    def __init__(self, name: str, make: Callable[[], TextEncoder]) -> None:
        self.name = name
        self._make = make

    @cached_property
    def encode(self) -> TextEncoder:
        """Open the encoder on first use; raises one of UNUSABLE_ERRORS."""
        return self._make()


def find_fastest_encoder(tokenizer: Tokenizer, sample: Sequence[str]) -> TextEncoder:
    """Search for the fastest encoder in this process."""
    return EncoderSearch(tokenizer, EncoderTrial()).find(sample)


class EncoderSearch:
    """Search for the fastest encoder with the tokenizer's ids; the most likely one is prepared at once."""

    def __init__(self, tokenizer: Tokenizer, trial: EncoderTrial) -> None:
        self._tokenizer = tokenizer
        self._trial = trial
        self._candidates = list[_Candidate]()
        self._hard_texts = list(HARD_TEXTS)
        if isinstance(tokenizer, FastTokenizer):
            content = tokenizer.content()
            self._candidates = [
                _Candidate(*candidate) for candidate in _candidate_encoders(tokenizer, content)
            ]
            self._hard_texts += _texts_with_added_tokens(content)
        with suppress(*UNUSABLE_ERRORS):  # `find` opens it again and logs the error
            for candidate in self._candidates[:1]:
                trial.prepare(candidate.encode)

    def find(self, sample: Sequence[str]) -> TextEncoder:
        """Return the first encoder with the tokenizer's ids on `sample`, HARD_TEXTS and added tokens.

        The choice is logged; as a warning with the reasons if a faster library was rejected.
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
        """Return the texts that can be encoded, and their ids."""
        texts = list[str]()
        wanted = list[list[int]]()
        for text in (*self._hard_texts, *sample):
            try:
                wanted.append(tokenizer.encode(text))
            except RequestError:
                continue
            texts.append(text)
        return texts, wanted


def _first_difference(encoded: FlatIds, texts: Sequence[str], wanted: Sequence[list[int]]) -> str | None:
    """Return the first of the texts whose ids are not the wanted ones."""
    ids, lengths = encoded
    ends = np.cumsum(lengths)
    for text, wanted_ids, end, length in zip(texts, wanted, ends, lengths, strict=True):
        if ids[end - length : end].tolist() != wanted_ids:
            return text
    return None


def _texts_with_added_tokens(content: Mapping[str, Any]) -> list[str]:
    """Return texts with the added tokens inside words, between spaces and side by side."""
    added = [token["content"] for token in content.get("added_tokens", [])][:_MAX_ADDED_TRIED]
    return [f"a{token}b {token} {token}{token}\n" for token in added]


def _candidate_encoders(
    tokenizer: FastTokenizer, content: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], TextEncoder]]]:
    """Yield the names of libraries that may encode, the fastest first, and functions that open them."""
    kind = content["model"].get("type", "BPE")
    if kind == "BPE":
        if _gigatoken_supports(content):
            yield GigatokenEncoder.name, partial(GigatokenEncoder.from_content, tokenizer, content)
        yield FastokensEncoder.name, partial(FastokensEncoder, tokenizer)
    pre_tokenizer = (content.get("pre_tokenizer") or {}).get("type")
    normalizer = (content.get("normalizer") or {"type": None}).get("type")
    if kind == "WordPiece" and pre_tokenizer == "BertPreTokenizer" and normalizer in (None, "BertNormalizer"):
        searched_tokens = [t for t in content.get("added_tokens", []) if not t["special"]]
        # the tokenizer searches such a token across spaces too
        if not any(t["lstrip"] or t["rstrip"] or set(t["content"]) & {" ", "\n"} for t in searched_tokens):
            yield CachedWordPieceEncoder.name, partial(CachedWordPieceEncoder, tokenizer)


def _gigatoken_supports(content: Mapping[str, Any]) -> bool:
    """Return whether gigatoken supports all settings that decide ids; it rejects most others, but not all.

    It splits words as GPT-2 even if a ByteLevel disables that or there is no pre-tokenizer, treats each Split
    as isolating, has no merge dropout, and of two equal merges uses the first, not the last.
    """
    model = content["model"]
    pre_tokenizer = content.get("pre_tokenizer") or {}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    if model.get("dropout") or len(set(merges)) < len(merges):
        return False
    if model.get("byte_fallback"):
        return True  # of such models it rejects every unsupported part
    *splits, level = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    all_isolated = all(
        part.get("type") == "Split" and part["behavior"] == "Isolated" and not part["invert"]
        for part in splits
    )
    adds_prefix_space = bool(splits) and level.get("add_prefix_space", False)
    splits_words_once = bool(splits) != level.get("use_regex", True)  # exactly one of the two splits
    return level.get("type") == "ByteLevel" and all_isolated and splits_words_once and not adds_prefix_space
