"""Outputs of one request on their way to a reader that may be slower than the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mega_serve.engine.requests import SequenceOutput


class OutputBuffer:
    """A buffer that joins the outputs of a sequence until the reader takes them.

    A reader that never comes back costs at most one output per sequence, as long as the request's
    `max_tokens` allow, and never holds up the engine.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, list[SequenceOutput]] = {}
        self._error: Exception | None = None
        self._wakeup = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """Add an output."""
        self._outputs.setdefault(output.index, []).append(output)
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        """Let `take` raise `error` once the outputs before it are taken."""
        self._error = self._error or error
        self._wakeup.set()

    async def take(self) -> list[SequenceOutput]:
        """Wait for outputs and return them, one per sequence."""
        await self._wakeup.wait()
        if self._outputs:
            outputs, self._outputs = self._outputs, {}
            if self._error is None:
                self._wakeup.clear()
            return [join_outputs(parts) for parts in outputs.values()]
        assert self._error is not None
        raise self._error


def join_outputs(parts: Sequence[SequenceOutput]) -> SequenceOutput:
    """Return consecutive outputs of one sequence as one."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    return SequenceOutput(
        request_id=first.request_id,
        index=first.index,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(part.text for part in parts),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        prompt_logprobs=tuple(logprob for part in parts for logprob in part.prompt_logprobs),
        cached_tokens=sum(part.cached_tokens for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        score=last.score,
        embedding=last.embedding,
        error=last.error,
        times=last.times,
    )
