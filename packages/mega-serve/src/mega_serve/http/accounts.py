"""The books of one HTTP request: who sent it, what it used, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mega_serve.engine.requests import EngineRequest, SequenceOutput
from mega_serve.http.errors import as_http_error
from mega_serve.http.metrics import ServerMetrics
from mega_serve.http.rate_limit import RateLimiter

# of a response: sent whole; not 2xx by the client's fault; cut or not begun for one of the other reasons
Outcome = Literal[
    "",
    "complete",
    "refused",
    "client_left",
    "deadline",
    "engine_error",
    "server_error",
    "server_stopping",
    "unavailable",
]
FAILURE_OUTCOMES: Mapping[int, Outcome] = MappingProxyType({503: "unavailable", 504: "deadline"})
REFUSAL = "refusal_status"  # key of a request's state: status of a response without the application
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLOSE_SECONDS = 1.0  # for the engine's generators of a request that was cancelled


@dataclass(slots=True, eq=False)
class RequestAccount:
    """An `Account` (mega_serve.api.context) that feeds metrics, rate limits and the audit line.

    Attributes:
        is_admitted: whether it is a request to an API, which draining waits for.
        rejection: why it was refused, for the metric of rejections.
        is_cut: whether the server stopped before it was answered.
        outcome: how the response ended; "" until that is known.
        has_output: whether the engine answered; latencies are of such requests only.
    """

    request_id: str
    arrival: float
    metrics: ServerMetrics
    rates: RateLimiter
    clock: Callable[[], float]
    key_id: str = ""
    is_admitted: bool = False
    rejection: str = ""
    is_cut: bool = False
    outcome: Outcome = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    has_output: bool = False
    finish_reasons: Counter[str] = field(default_factory=Counter)
    task: asyncio.Task[None] | None = None
    _last_output: dict[tuple[str, int], float] = field(default_factory=dict)
    _sequence_tokens: Counter[tuple[str, int]] = field(default_factory=Counter)
    _generators: list[AsyncIterator[SequenceOutput]] = field(default_factory=list)

    def charge(self, request: EngineRequest) -> None:
        """Count the prompt. Whether the key may run a request was decided when it arrived."""
        tokens = len(request.prompt_token_ids)
        self.prompt_tokens += tokens
        self.rates.debit_tokens(self.key_id, tokens, self.clock())
        self.metrics.observe_request(request)

    def track(self, outputs: AsyncIterator[SequenceOutput]) -> None:
        """Close the outputs in `close`."""
        self._generators.append(outputs)

    def record(self, request: EngineRequest, output: SequenceOutput) -> None:
        """Count an output: tokens, latencies, the reason of its end."""
        now = self.clock()
        self.has_output = True
        tokens = len(output.token_ids)
        self.generated_tokens += tokens
        self.cached_tokens += output.cached_tokens
        self.rates.debit_tokens(self.key_id, tokens, now)
        sequence = (request.request_id, output.index)
        last = self._last_output.get(sequence)
        if tokens and last is None:
            self.metrics.time_to_first_token.observe(now - self.arrival)
        elif tokens and last is not None:
            # outputs of several steps come as one if the client is slow: each token counts as its share
            for _ in range(tokens):
                self.metrics.inter_token_latency.observe((now - last) / tokens)
        if tokens:
            self._last_output[sequence] = now
            self._sequence_tokens[sequence] += tokens
        if output.finish_reason is not None:
            self.finish_reasons[output.finish_reason] += 1
            self.metrics.observe_finish(output.finish_reason, output.times, self._sequence_tokens[sequence])

    def record_failure(self, error: Exception) -> None:
        """Note the error that ended the answer, whose status may be sent already. The first one counts."""
        http_error = as_http_error(error)
        outcome: Outcome = "refused"
        if http_error.status >= 500:
            outcome = FAILURE_OUTCOMES.get(http_error.status, "server_error")
            if http_error.code in ("engine_dead", "engine_error"):
                outcome = "engine_error"
        self.outcome = self.outcome or outcome

    async def close(self) -> None:
        """End what the engine still does for this request."""
        for outputs in self._generators:
            # RuntimeError: it is being closed by the task that ran it
            with contextlib.suppress(RuntimeError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await outputs.aclose()  # type: ignore[attr-defined]  # of every asynchronous generator
        self._generators.clear()

    def audit_line(self, *, method: str, route: str, status: int, client: str) -> dict[str, Any]:
        """Return the request as one line of the audit log: who, what, how much; never any text of it."""
        return {
            "event": "request",
            "request_id": self.request_id,
            "key_id": self.key_id,
            "client": client,
            "method": method,
            "route": route,
            "status": status,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "finish_reasons": dict(self.finish_reasons),
            "ms": round(1000 * (self.clock() - self.arrival), 1),
        }


def read_request_id(header: str | None) -> str:
    """Return the client's x-request-id, or a new one if there is none or it is more than an id."""
    return header if header and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


@dataclass(slots=True, eq=False)
class Lifecycle:
    """Whether the server accepts requests, and those in progress."""

    is_draining: bool = False
    accounts: set[RequestAccount] = field(default_factory=set)

    @property
    def active_requests(self) -> int:
        """Requests to the APIs that are not answered yet."""
        return sum(account.is_admitted for account in self.accounts)

    def cut_requests(self) -> None:
        """Cancel what is in progress; each request gets a 503, or an error event at the end of its stream."""
        for account in self.accounts:
            if account.task and account.is_admitted:
                account.is_cut = True
                account.task.cancel()
