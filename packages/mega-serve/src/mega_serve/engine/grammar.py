"""Structured output: grammars, compiled by llguidance, that say which ids may come next.

A grammar from a client is checked in a child process (`GrammarCompiler.validate`) before its request is
queued.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.grammar_checker import GrammarChecker
from mega_serve.engine.grammar_matcher import first_line, open_matcher, open_vocabulary
from mega_serve.engine.json_whitespace import json_options
from mega_serve.engine.requests import GrammarSpec
from mega_serve.engine.structural_tags import write_structural_tag
from mega_serve.engine.token_bytes import list_token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_TEXT_BYTES: Final = 64 * 1024


class GrammarError(Exception):
    """A sequence cannot go on in its grammar; it ends with "error"."""


class GrammarMatcher:
    """Progress of one sequence in a grammar; the `GrammarState` of the engine."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing may follow it."""
        return bool(self._matcher.is_stopped())

    @property
    def may_stop(self) -> bool:
        """Whether the text is complete, though more may follow."""
        return bool(self._matcher.is_accepting())

    def accept(self, token_id: int) -> None:
        """Advance by an id.

        Raises:
            GrammarError: the grammar does not allow it, or its next state is too large.
        """
        if not self._matcher.consume_token(token_id):
            raise GrammarError(first_line(self._matcher.get_error()))

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write one bit per id, lowest bit first: 1 for an id that may come next.

        Args:
            mask: contiguous, (ceil(vocab_size / 32),).

        Raises:
            GrammarError: the limits of llguidance were exceeded.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise GrammarError(first_line(self._matcher.get_error()))
        mask[:] = bits[: len(mask)]

    def copy(self) -> GrammarMatcher:
        """Return an independent state at the same place (a fork of the sequence)."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be used by several threads.

    `validate` works in a child process, which `close` ends; `compile` in this one.

    Raises:
        RequestError: the tokenizer has no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = list_token_bytes(tokenizer)
        eod = tokenizer.identity.eod
        special_ids = sorted(vocabulary.special_ids)
        self._tokenizer = open_vocabulary(vocabulary.tokens, special_ids, eod)
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        self._checker = GrammarChecker({"tokens": tokens, "special_ids": special_ids, "eod": eod})

    def start(self) -> None:
        """Start the child process of `validate`, for a first request without delay."""
        self._checker.start()

    def close(self) -> None:
        """End the child process."""
        self._checker.close()

    def validate(self, spec: GrammarSpec) -> None:
        """Check that a grammar compiles within 50 ms of CPU time and that some text matches it.

        Raises:
            RequestError: it does not.
        """
        if error := self._checker.check(_write_grammar(spec)):
            raise _refuse(spec, error)

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return the state of a new sequence, for a grammar that `validate` accepted.

        Raises:
            RequestError: the text is not a grammar of its kind, matches nothing, or exceeds a limit.
        """
        matcher, error = open_matcher(self._tokenizer, _write_grammar(spec))
        if error:
            raise _refuse(spec, error)
        return GrammarMatcher(matcher)


def _write_grammar(spec: GrammarSpec) -> str:
    """Return llguidance's form of a grammar, after the checks of its text.

    Raises:
        RequestError: the text is refused.
    """
    write = _WRITERS.get(spec.kind)
    if write is None:
        raise RequestError("grammar", "unknown kind", found=repr(spec.kind), wanted=" | ".join(_WRITERS))
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise _refuse(spec, "half of a surrogate pair") from None
    if size > MAX_TEXT_BYTES:
        raise RequestError(
            spec.param or spec.kind, "too long", found=f"{size} bytes", wanted=f"at most {MAX_TEXT_BYTES}"
        )
    return write(spec)


def _write_schema(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError):
        schema = None  # llguidance says what is wrong
    try:
        return str(LLMatcher.grammar_from_json_schema(spec.text, defaults=json_options(schema)))
    except ValueError as error:
        raise _refuse(spec, first_line(str(error)), "a JSON schema") from None


def _write_json_object(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=json_options({})))


def _write_regex(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(spec.text))


def _write_lark(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(spec.text))


def _write_choice(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    try:
        choices = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise _refuse(spec, first_line(str(error)), "a JSON list of strings") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise _refuse(spec, "not a list of choices", "at least one string, none empty")
    # one expression rather than a rule for each: a choice may be the beginning of another
    return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, sorted(set(choices))))))


def _write_structural_tag(spec: GrammarSpec) -> str:
    from llguidance import LLMatcher

    try:
        grammar = write_structural_tag(spec.text, json_options)
    except ValueError as error:
        raise _refuse(spec, first_line(str(error)), "structures and triggers, as in vLLM") from None
    return str(LLMatcher.grammar_from_lark(grammar))


_WRITERS: Final[Mapping[str, Callable[[GrammarSpec], str]]] = MappingProxyType(
    {
        "json_schema": _write_schema,
        "json_object": _write_json_object,
        "regex": _write_regex,
        "lark": _write_lark,
        "choice": _write_choice,
        "structural_tag": _write_structural_tag,
    }
)


def _refuse(spec: GrammarSpec, what: str, wanted: str = "") -> RequestError:
    param = spec.param or spec.kind
    return RequestError(param, what, wanted=wanted) if wanted else RequestError(param, what)
