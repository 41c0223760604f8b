"""Log-probabilities in the shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.requests import TokenLogprob

LOWEST_LOGPROB = -9999.0  # OpenAI's value of a token without probability: JSON has no infinity
_REPLACEMENT = "\ufffd"
_MAX_PARTS = 8  # tokens that one character may be split into


class CompletionLogprobs:
    """Builds the `logprobs` object of /v1/completions, part by part.

    Args:
        top: number of most probable words asked for.
        text_offset: position of the first token in the text.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, text_offset: int = 0) -> None:
        self.tokenizer = tokenizer
        self.top = top
        self.start = text_offset
        self.partial_ids: list[int] = []

    def append(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, list[Any]]:
        """Return the arrays of further tokens: tokens, token_logprobs, top_logprobs, text_offset."""
        tokens = self.tokenizer.pieces(token_ids)
        arrays: dict[str, list[Any]] = {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": [
                self._advance(token, piece) for token, piece in zip(token_ids, tokens, strict=True)
            ],
        }
        return arrays

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        words = _top_words(entry, self.top)
        # the token itself is always one of them; the same float, so that a client can compare
        words.append((entry.token_id, finite(entry.logprob)))
        pieces = self.tokenizer.pieces([token for token, _ in words])
        top: dict[str, float] = {}
        for piece, (_, logprob) in zip(pieces, words, strict=True):
            # two ids may have one text, of which the more probable counts
            top[piece] = max(logprob, top.get(piece, LOWEST_LOGPROB))
        return top

    def _advance(self, token: int, piece: str) -> int:
        """Return the offset of a token: the whole characters before it."""
        if _REPLACEMENT not in piece:
            self._end_character()
            offset = self.start
            self.start += len(piece)
            return offset
        before = self.tokenizer.decode(self.partial_ids).rstrip(_REPLACEMENT) if self.partial_ids else ""
        offset = self.start + len(before)
        self.partial_ids.append(token)
        if len(self.partial_ids) == _MAX_PARTS:
            self._end_character()
        return offset

    def _end_character(self) -> None:
        if self.partial_ids:
            self.start += len(self.tokenizer.decode(self.partial_ids))
            self.partial_ids.clear()


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob], top: int) -> dict[str, Any]:
    """Return the `logprobs` object of /v1/chat/completions."""
    return {"content": [_chat_token(tokenizer, entry, top) for entry in entries], "refusal": None}


def _chat_token(tokenizer: Tokenizer, entry: TokenLogprob, top: int) -> dict[str, Any]:
    words = _top_words(entry, top)
    [piece, *pieces] = tokenizer.pieces([entry.token_id, *(token for token, _ in words)])
    top_words = [_word(text, logprob) for text, (_, logprob) in zip(pieces, words, strict=True)]
    return {**_word(piece, finite(entry.logprob)), "top_logprobs": top_words}


def _word(piece: str, logprob: float) -> dict[str, Any]:
    # OpenAI: null where the token's bytes are not known; a part of a character shows as U+FFFD
    known_bytes = None if _REPLACEMENT in piece else list(piece.encode())
    return {"token": piece, "logprob": logprob, "bytes": known_bytes}


def _top_words(entry: TokenLogprob, top: int) -> list[tuple[int, float]]:
    own = finite(entry.logprob)
    return [(token, own if token == entry.token_id else finite(value)) for token, value in entry.top[:top]]


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for every token of the prompt the words by id."""
    rows: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        words = {token: (logprob, rank + 1) for rank, (token, logprob) in enumerate(_top_words(entry, top))}
        words.setdefault(entry.token_id, (finite(entry.logprob), entry.rank))
        pieces = tokenizer.pieces(list(words))
        rows.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": piece}
                for piece, (token, (logprob, rank)) in zip(pieces, words.items(), strict=True)
            }
        )
    return rows


def finite(logprob: float) -> float:
    """Return the log-probability as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)
