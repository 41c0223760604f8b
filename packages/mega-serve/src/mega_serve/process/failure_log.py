"""Describe unexpected exceptions for the log, without their messages: these may quote a request."""

from __future__ import annotations

import traceback

_WITHHELD = "(message withheld: it may quote a request)"


def describe_failure(error: BaseException, *, with_messages: bool) -> str:
    """Return the class of an exception and of those that caused it, each with the lines of code it passed.

    Args:
        with_messages: the operator asked for prompts in the log (`--log-prompts`).
    """
    parts = []
    cause: BaseException | None = error
    while cause is not None:
        message = str(cause) if with_messages else _WITHHELD
        parts.append(
            f"{type(cause).__name__}: {message}\n{''.join(traceback.format_tb(cause.__traceback__))}"
        )
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "caused by ".join(parts)
