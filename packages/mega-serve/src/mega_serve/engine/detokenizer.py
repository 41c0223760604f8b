"""Turn the ids of one sequence into text while they are generated.

An id's text depends on its neighbours: characters span ids, and SentencePiece strips a space only at the
beginning. So a window of the last ids is decoded, of which the first are context whose text is known; the new
text is what follows it (the scheme of vLLM and TGI). The window stays short: the cost of an id does not grow
with the sequence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.stop_strings import StopStringMatcher
from mega_serve.engine.token_bytes import find_special_ids

_REPLACEMENT: Final = "\ufffd"
# an incomplete character has at most three bytes, which decode to at most three U+FFFD
_INCOMPLETE_CHARS: Final = 3
_CONTEXT_IDS: Final = 6
_WINDOW_IDS: Final = 12
# a context of blanks alone could be stripped, so the window grows; up to here
_LONGEST_WINDOW: Final = 64


class Detokenizer:
    """The text of one sequence, without the prompt's.

    The parts that `append` and `flush` return are, together, decode(prompt + ids) without decode(prompt), up
    to the stop string. End-of-document, beginning and padding contribute no text at the end.

    Args:
        stop: strings that end the text.
        include_stop_str: whether the text ends with the stop string or before it.
        min_tokens: text of the first ids in which no stop string is looked for.
        skip_special_tokens: True: no special token contributes text; False: each does; None: each but those
            three at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        identity = tokenizer.identity
        named_ids = {i for i in (identity.eod, identity.bos, identity.pad) if i is not None}
        self._tail_ids = named_ids if skip_special_tokens is None else frozenset[int]()
        self._skipped_ids = frozenset[int]()
        if skip_special_tokens:
            self._skipped_ids = find_special_ids(tokenizer)  # type: ignore[arg-type]  # each class has a hash
        self._special_tail: list[int] = []
        self._window = _cut_prompt(tokenizer, prompt_token_ids)
        self._emitted = tokenizer.decode(self._window)
        self._matcher = StopStringMatcher(stop) if stop else None
        self._include_stop_str = include_stop_str
        self._unmatched_tokens = min_tokens
        self._pending_text = ""
        self._is_stopped = False

    def append(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Add ids; return the text that is certain by now, and the stop string that it completes.

        Text is not certain while it may be part of a character or of a stop string. Nothing is returned after
        a stop string.
        """
        if self._matcher is None:
            return "".join([self._decode_next(token_id) for token_id in token_ids]), None
        parts = list[str]()
        for token_id in token_ids:
            text, stop = self._match(self._decode_next(token_id))
            parts.append(text)
            if stop is not None:
                return "".join(parts), stop
        return "".join(parts), None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        text, stop = self._match(self._take_text(is_final=True))
        pending = "" if stop is not None else self._pending_text
        self._pending_text = ""
        return text + pending

    def _decode_next(self, token_id: int) -> str:
        """Add an id; return new whole characters."""
        self._unmatched_tokens -= 1
        if token_id in self._skipped_ids:
            return ""
        if token_id in self._tail_ids:
            self._special_tail.append(token_id)
            return ""
        self._window += [*self._special_tail, token_id]
        self._special_tail.clear()
        return self._take_text(is_final=False)

    def _take_text(self, *, is_final: bool) -> str:
        """Return the window's text beyond the emitted one, and shorten the window."""
        text = self._tokenizer.decode(self._window)
        end = len(text) if is_final else _end_of_whole_chars(text)
        start = len(self._emitted)
        if not text.startswith(self._emitted):
            # bytes at the end of the prompt became a character
            start = len(os.path.commonprefix([text, self._emitted]))
        if end > start:
            self._emitted = text[:end]
        if len(self._window) > _WINDOW_IDS:
            self._shorten_window(text)
        return text[start:end]

    def _shorten_window(self, text: str) -> None:
        """Drop the first ids of the window, if the rest of it decodes to the end of its text."""
        window = self._window[-_CONTEXT_IDS:]
        context = self._tokenizer.decode(window)
        # SentencePiece strips blanks before the first text, so blanks alone are no context
        is_safe = context.strip(" ") and text.endswith(context)
        emitted = len(self._emitted) - (len(text) - len(context))
        if emitted > 0 and (is_safe or len(self._window) > _LONGEST_WINDOW):
            self._window = window
            self._emitted = context[:emitted]

    def _match(self, text: str) -> tuple[str, str | None]:
        """Return the held and the new text, as far as no stop string can contain it, and the stop string."""
        if self._matcher is None or self._is_stopped:
            return ("" if self._is_stopped else text), None
        if self._unmatched_tokens >= 0:
            return text, None
        before = len(self._pending_text)
        text = self._pending_text + text
        for i in range(before, len(text)):
            if (stop := self._matcher.advance(text[i])) is not None:
                self._is_stopped = True
                self._pending_text = ""
                end = i + 1
                return text[: end if self._include_stop_str else end - len(stop)], stop
        certain = len(text) - self._matcher.possible_chars
        self._pending_text = text[certain:]
        return text[:certain], None


def _cut_prompt(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the last ids of the prompt, as many as the text after them depends on."""
    size = _CONTEXT_IDS
    while size < min(len(prompt_token_ids), _LONGEST_WINDOW):
        ids = list(prompt_token_ids[-size:])
        if tokenizer.decode(ids).strip(" "):
            return ids
        size *= 2
    return list(prompt_token_ids[-size:])


def _end_of_whole_chars(text: str) -> int:
    """Return the length of the text without the U+FFFD at its end that may still become a character."""
    end = len(text)
    while end and len(text) - end < _INCOMPLETE_CHARS and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end
