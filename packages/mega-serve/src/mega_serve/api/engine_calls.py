"""Run requests of the engine for a client, and stop them when it disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request

from mega_serve.api.context import ApiContext
from mega_serve.engine.requests import EngineRequest, FinishReason, SequenceOutput, TokenLogprob
from mega_serve.http.errors import SERVER_ERROR, UNAVAILABLE_RETRY_SECONDS, HttpError, retry_after

CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client never sees it, the log does
_QUEUED_OUTPUTS = 64  # outputs of the engine that wait for a slow client

T = TypeVar("T")


class ClientDisconnectedError(HTTPException):
    """The client has disconnected: no response is needed. Its status is for the log."""


@dataclass(slots=True)
class GeneratedSequence:
    """A sequence that the engine generated.

    Attributes:
        stop_reason: the stop string or id that ended it.
        score: of a beam search hypothesis.
        embedding: of the prompt, if asked.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    embedding: tuple[float, ...] = ()

    def append(self, output: SequenceOutput) -> None:
        """Add what the sequence gained in a step."""
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.score = output.score
        self.embedding = output.embedding


@dataclass(slots=True)
class GeneratedResult:
    """All sequences of a request, by index."""

    sequences: list[GeneratedSequence]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0


def new_id(prefix: str) -> str:
    """Return an id that no other request has."""
    return f"{prefix}-{uuid4().hex}"


async def run_requests(
    context: ApiContext, http_request: Request, requests: Sequence[EngineRequest]
) -> list[GeneratedResult]:
    """Run the requests at the same time and return their results in order.

    If one fails or the client disconnects, the others are aborted.

    Raises:
        ClientDisconnectedError: the result is no longer wanted.
        Exception: as `ApiContext.generate`, and HttpError for a request that the engine did not finish.
    """
    results = [GeneratedResult([GeneratedSequence() for _ in range(request.rows)]) for request in requests]

    async def collect() -> None:
        async with aclosing(stream_requests(context, http_request, requests)) as outputs:
            async for index, output in outputs:
                result = results[index]
                result.sequences[output.index].append(output)
                result.prompt_logprobs = result.prompt_logprobs or output.prompt_logprobs
                result.cached_tokens = max(result.cached_tokens, output.cached_tokens)

    await run_until_disconnect(http_request, collect())
    return results


async def stream_requests(
    context: ApiContext, http_request: Request, requests: Sequence[EngineRequest]
) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
    """Run the requests at the same time and yield (number of the request, output) as they come.

    Closing the iterator aborts all requests.

    Raises:
        Exception: as `ApiContext.generate`, and HttpError for a request that the engine did not finish.
    """
    if len(requests) == 1:
        async with aclosing(_outputs(context, http_request, requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, SequenceOutput | Exception | None]] = asyncio.Queue(_QUEUED_OUTPUTS)

    async def pump(index: int, request: EngineRequest) -> None:
        last: Exception | None = None
        try:
            async with aclosing(_outputs(context, http_request, request)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            last = error
        await queue.put((index, last))

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await _cancel(*tasks)


async def run_until_disconnect(http_request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, and cancel it when the client disconnects. The body must have been read.

    Raises:
        ClientDisconnectedError: the result is no longer wanted.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(wait_for_disconnect(http_request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError(CLIENT_CLOSED_REQUEST, "the client has disconnected")
        return task.result()
    finally:
        await _cancel(task, watch)


async def wait_for_disconnect(http_request: Request) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await http_request.receive())["type"] != "http.disconnect":
        pass


async def _outputs(
    context: ApiContext, http_request: Request, request: EngineRequest
) -> AsyncGenerator[SequenceOutput, None]:
    async with aclosing(context.generate(request, http_request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            _check_finish(output)
            yield output


def _check_finish(output: SequenceOutput) -> None:
    """Raise an error for a sequence that the server stopped: a text that was cut must not look whole."""
    if output.finish_reason == "abort":
        raise HttpError(
            503,
            "the server stopped the request",
            type=SERVER_ERROR,
            code="aborted",
            headers=retry_after(UNAVAILABLE_RETRY_SECONDS),
        )


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
