"""Encode a context and its continuation as lm-evaluation-harness does, as a window of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_eval.windows import Window, suffix_window
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.special_tokens import added_tokens
from mega_schema.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text to score after a context.

    Attributes:
        where: the place in the file, for error messages.
        context, text: white space at the end of the context counts as the beginning of the text.
    """

    where: str
    context: str
    text: str


def build_continuation_windows(
    continuations: Sequence[Continuation], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Window], list[bool]]:
    """Build a window for each continuation.

    Context and text are encoded as one string, and the tokens after those of the context alone are the
    targets; a tokenizer may merge letters across their border. Tokens that the tokenizer adds before a text
    (BOS) come first. Without context, BOS is the context, or the end-of-document token.

    Args:
        max_length: tokens the model can read; a longer window loses its beginning.

    Returns:
        The windows, and whether each was truncated.

    Raises:
        FormatError: a text has no tokens of its own.
        ConfigError: there is no context and the tokenizer has neither BOS nor end-of-document token.
    """
    pairs = [_move_spaces(continuation) for continuation in continuations]
    contexts = sorted({context for context, _ in pairs})
    encoded = dict(zip(contexts, tokenizer.encode_batch(contexts), strict=True))
    wholes = tokenizer.encode_batch([context + text for context, text in pairs])
    prefix = list(added_tokens(tokenizer).prefix)
    windows, truncations = [], []
    for continuation, (context, _), whole in zip(continuations, pairs, wholes, strict=True):
        length = len(encoded[context])
        targets = whole[length:]
        if not targets:
            raise FormatError(
                continuation.where,
                "a choice has no tokens after its context",
                found=repr(continuation.text[:40]),
                wanted="a text that is not empty",
            )
        start = (prefix + whole[:length]) or [_first_token(tokenizer)]
        window, was_truncated = suffix_window(start, targets, max_length)
        windows.append(window)
        truncations.append(was_truncated)
    return windows, truncations


def _move_spaces(continuation: Continuation) -> tuple[str, str]:
    context = continuation.context.rstrip()
    return context, continuation.context[len(context) :] + continuation.text


def _first_token(tokenizer: Tokenizer) -> int:
    identity = tokenizer.identity
    token = identity.eod if identity.bos is None else identity.bos
    if token is None:
        raise ConfigError(
            "--load",
            "the tokenizer has no token to begin a text with",
            found=identity.type,
            wanted="BOS or an end-of-document token",
        )
    return token
