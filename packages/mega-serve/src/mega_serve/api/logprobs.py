"""Log-probabilities in the shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.requests import TokenLogprob
from mega_serve.engine.token_bytes import keep_token_bytes

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
        pieces = self.tokenizer.pieces(token_ids)
        arrays: dict[str, list[Any]] = {
            "tokens": _names(self.tokenizer, token_ids, pieces),
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": [
                self._advance(token, piece) for token, piece in zip(token_ids, pieces, strict=True)
            ],
        }
        return arrays

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        words = _top_words(entry, self.top)
        # the token itself is always one of them; the same float, so that a client can compare
        words.append((entry.token_id, finite(entry.logprob)))
        ids = [token for token, _ in words]
        names = _names(self.tokenizer, ids, self.tokenizer.pieces(ids))
        top: dict[str, float] = {}
        for name, (_, logprob) in zip(names, words, strict=True):
            # two ids may have one text, of which the more probable counts
            top[name] = max(logprob, top.get(name, LOWEST_LOGPROB))
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
    words = [(entry.token_id, finite(entry.logprob)), *_top_words(entry, top)]
    ids = [token for token, _ in words]
    pieces = tokenizer.pieces(ids)
    [word, *top_words] = [
        {"token": piece, "logprob": logprob, "bytes": list(_piece_bytes(tokenizer, token, piece))}
        for piece, (token, logprob) in zip(pieces, words, strict=True)
    ]
    return {**word, "top_logprobs": top_words}


def _names(tokenizer: Tokenizer, ids: Sequence[int], pieces: Sequence[str]) -> list[str]:
    """Return each piece; parts of characters by their bytes, as OpenAI names them: bytes:\\xe2\\x98."""
    return [_name(_piece_bytes(tokenizer, i, piece), piece) for i, piece in zip(ids, pieces, strict=True)]


def _name(content: bytes, piece: str) -> str:
    return piece if content == piece.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _piece_bytes(tokenizer: Tokenizer, token_id: int, piece: str) -> bytes:
    """Return the bytes of a token, also of one that is part of a character, whose piece has U+FFFD."""
    if _REPLACEMENT not in piece:
        return piece.encode()
    return keep_token_bytes(tokenizer).tokens[token_id]  # type: ignore[arg-type]  # each class has a hash


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
