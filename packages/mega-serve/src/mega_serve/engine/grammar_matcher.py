"""llguidance with the limits of the server. Imports nothing else, so that a small process can use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MESSAGE_CHARS: Final = 200
_LONGEST_TOKEN: Final = 32
_NO_TEXT: Final = "NoExtensionBias"  # llguidance's word for a state that nothing can follow


class _Vocabulary:
    """A tokenizer as llguidance wants it: an object with these attributes."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eod: int | None) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = list(special_ids)
        self.bos_token_id = None
        special = set(special_ids)
        if eod is None:
            # llguidance needs one; it has no logit, and a finished text ends the sequence without it
            eod = len(self.tokens)
            self.special_token_ids.append(eod)
            self.tokens.append(b"<eod>")
        self.eos_token_id = eod

        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in special and token}
        self._longest = min(_LONGEST_TOKEN, max(map(len, self._ids), default=1))

    def __call__(self, text: str | bytes) -> list[int]:
        """Return ids whose bytes are the text, the longest first; llguidance asks it for text it forces.

        The tokenizer's own `encode` could put a space before the text.
        """
        data = text.encode() if isinstance(text, str) else text
        ids = list[int]()
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:  # a byte without an id
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def open_vocabulary(tokens: Sequence[bytes], special_ids: Sequence[int], eod: int | None) -> LLTokenizer:
    """Return the vocabulary as llguidance's tokenizer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special_ids, eod)))


def open_matcher(tokenizer: LLTokenizer, grammar: str) -> tuple[LLMatcher, str]:
    """Compile a grammar in llguidance's own form; return also why it is refused, "" if it is not."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=50_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=20_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        # a grammar without any text compiles; its first mask says so
        matcher.compute_bitmask()
    error = first_line(matcher.get_error()) if matcher.is_error() else ""
    return matcher, "no text matches it" if error == _NO_TEXT else error


def first_line(message: str) -> str:
    """Return the part of llguidance's message that names the cause, on one line."""
    message = message.split("\n<", 1)[0]
    cause = re.search(r"^error: (.*)$", message, re.MULTILINE)
    line = cause[1] if cause else message.strip().split("\n", 1)[0]
    return line if len(line) <= _MESSAGE_CHARS else line[:_MESSAGE_CHARS] + "..."
