"""Send the requests of a workload at their arrival times and measure the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from mega_serve.client.bench.latency_metrics import RequestResult
from mega_serve.client.bench.workload import Prompt
from mega_serve.client.generation import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MEGATRON,
    TokenUsage,
    continuation,
    megatron_body,
    request_megatron,
    stream_text,
)
from mega_serve.client.http import ServerClient, ServerError

Backend = Literal["openai", "openai-chat", "megatron"]
ENDPOINTS: Final[Mapping[Backend, str]] = MappingProxyType(
    {
        "openai": COMPLETIONS,
        "openai-chat": CHAT_COMPLETIONS,
        "megatron": MEGATRON,
    }
)
Send = Callable[[Prompt], Awaitable[RequestResult]]


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What all requests of a run have in common.

    Attributes:
        endpoint: path below the server's address.
        fields: of every request's body: model, sampling, extra ones.
    """

    backend: Backend
    endpoint: str
    fields: Mapping[str, Any]


@dataclass(slots=True)
class LoadRun:
    """The results of a run.

    Attributes:
        duration: seconds from the start to the last answer.
        client_cpu_seconds: CPU time of this process during the run.
        max_send_lag: the longest time in seconds from a planned arrival to the start of its task, before any
            wait for `max_concurrency`: how well this client kept up.
    """

    results: list[RequestResult]
    duration: float
    client_cpu_seconds: float
    max_send_lag: float


async def run_load(
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    send: Send,
    *,
    max_concurrency: int | None = None,
    on_result: Callable[[RequestResult], None] = lambda result: None,
    now: Callable[[], float] = time.perf_counter,
    cpu_time: Callable[[], float] = time.process_time,
) -> LoadRun:
    """Send every prompt at its arrival time and wait for all answers.

    Args:
        arrivals: seconds from the start, ascending, one per prompt.
        send: sends one request; does not raise for a request that fails.
        max_concurrency: requests that run at a time; others wait in the client. None: no limit.
        now: the clock of the results; advances with the event loop's.
    """
    limit: asyncio.Semaphore | nullcontext[None] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )
    start = now()
    cpu_start = cpu_time()
    max_send_lag = 0.0

    async def send_one(prompt: Prompt) -> RequestResult:
        arrival = now()
        async with limit:
            queue_time = now() - arrival
            result = await send(prompt)
        result.queue_time = queue_time
        on_result(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            delay = start + arrival - now()
            if delay > 0:
                await asyncio.sleep(delay)
            max_send_lag = max(max_send_lag, now() - start - arrival)
            tasks.append(group.create_task(send_one(prompt)))
    return LoadRun([task.result() for task in tasks], now() - start, cpu_time() - cpu_start, max_send_lag)


async def send_request(client: ServerClient, settings: RequestSettings, prompt: Prompt) -> RequestResult:
    """Send one request and measure its answer; an error becomes part of the result."""
    result = RequestResult(prompt_tokens=prompt.tokens or 0, start_time=client.now())
    try:
        if settings.backend == "megatron":
            await _send_megatron(client, settings, prompt, result)
        else:
            await _send_openai(client, settings, prompt, result)
    except ServerError as error:
        result.error = str(error)
    return result


def request_body(settings: RequestSettings, prompt: Prompt) -> dict[str, Any]:
    """Return the body of a request."""
    if settings.backend == "megatron":
        assert isinstance(prompt.content, str), "PUT /api takes text"
        return megatron_body(prompt.content, prompt.output_tokens, settings.fields)
    if settings.backend == "openai-chat":
        messages = [{"role": "user", "content": prompt.content}]
        return {"messages": messages, "max_completion_tokens": prompt.output_tokens, **settings.fields}
    return {"prompt": prompt.content, "max_tokens": prompt.output_tokens, **settings.fields}


async def _send_openai(
    client: ServerClient, settings: RequestSettings, prompt: Prompt, result: RequestResult
) -> None:
    usage = TokenUsage()
    pieces: list[str] = []
    chunks = 0
    last = result.start_time
    body = request_body(settings, prompt)
    async with aclosing(stream_text(client, settings.endpoint, body, usage)) as deltas:
        async for delta, received_at in deltas:
            pieces.append(delta.text)
            result.latency = received_at - result.start_time
            if not delta.has_token:
                continue
            chunks += 1
            if result.ttft is None:
                result.ttft = received_at - result.start_time
            else:
                result.itls.append(received_at - last)
            last = received_at
    if result.ttft is None:
        result.error = f"{client.address.url(settings.endpoint)}: the answer has no tokens"
    result.text = "".join(pieces)
    result.output_tokens = usage.completion_tokens if usage.completion_tokens is not None else chunks
    if usage.prompt_tokens is not None:
        result.prompt_tokens = usage.prompt_tokens


async def _send_megatron(
    client: ServerClient, settings: RequestSettings, prompt: Prompt, result: RequestResult
) -> None:
    """Send `PUT /api`, which has no stream: only the end-to-end latency can be measured."""
    answers = await request_megatron(client, request_body(settings, prompt))
    result.latency = client.now() - result.start_time
    answer = answers[0]
    assert isinstance(prompt.content, str), "PUT /api takes text"
    result.text = continuation(answer, prompt.content)
    if answer.segments and prompt.tokens is not None:
        result.output_tokens = max(len(answer.segments) - prompt.tokens, 0)
    else:
        result.output_tokens = prompt.output_tokens
