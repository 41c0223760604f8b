"""The middleware around every request: id, account, body limits, cancellation, headers, audit line."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable
from types import MappingProxyType

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mega_serve.engine.interfaces import EngineClient
from mega_serve.http.accounts import (
    FAILURE_OUTCOMES,
    REFUSAL,
    Lifecycle,
    Outcome,
    RequestAccount,
    read_request_id,
)
from mega_serve.http.config import ServerConfig
from mega_serve.http.errors import SERVER_ERROR, HttpError, as_http_error, retry_after
from mega_serve.http.metrics import ServerMetrics
from mega_serve.http.rate_limit import RateLimiter
from mega_serve.http.responses import SECURITY_HEADERS, error_response, identity_headers
from mega_serve.process.failure_log import describe_failure

logger = logging.getLogger("mega.serve")
audit_logger = logging.getLogger("mega.serve.audit")

CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client never sees it, the log does
_CLOSE = MappingProxyType({"Connection": "close"})
_RESTART_SECONDS = 30.0  # for an orchestrator to bring a new server up


class ExchangeMiddleware:
    """Run each HTTP request as an `_Exchange`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        client: EngineClient,
        config: ServerConfig,
        lifecycle: Lifecycle,
        metrics: ServerMetrics,
        rates: RateLimiter,
        clock: Callable[[], float],
    ) -> None:
        self._app = app
        self._client = client
        self._config = config
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._rates = rates
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ids = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
        account = RequestAccount(
            request_id=read_request_id(ids[0] if ids else None),
            arrival=self._clock(),
            metrics=self._metrics,
            rates=self._rates,
            clock=self._clock,
        )
        scope.setdefault("state", {})["account"] = account
        exchange = _Exchange(scope, receive, send, account, self._config, self._client)
        self._lifecycle.accounts.add(account)
        try:
            await exchange.run(self._app)
        finally:
            self._lifecycle.accounts.discard(account)
            refusal = scope["state"].get(REFUSAL)
            account.outcome = account.outcome or ("refused" if refusal else exchange.outcome)
            self._report(scope, account, exchange.route, refusal or exchange.status)

    def _report(self, scope: Scope, account: RequestAccount, route: str, status: int) -> None:
        rejection = account.rejection or {429: "overloaded", 503: "unavailable"}.get(status, "")
        self._metrics.observe_response(
            route=route,
            status=status,
            rejection=rejection if account.is_admitted or account.rejection else "",
        )
        if account.has_output:
            self._metrics.e2e_latency.observe(self._clock() - account.arrival)
            self._metrics.generation_tokens.observe(account.generated_tokens)
        client = scope.get("client")
        line = account.audit_line(
            method=scope["method"], route=route, status=status, client=client[0] if client else ""
        )
        # a probe every second would bury the rest
        level = logging.INFO if account.is_admitted or status >= 400 else logging.DEBUG
        if audit_logger.isEnabledFor(level):
            audit_logger.log(level, json.dumps(line))


class _Exchange:
    """One request and its response.

    Attributes:
        status: of the response; 499 if the client left before it began.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        account: RequestAccount,
        config: ServerConfig,
        client: EngineClient,
    ) -> None:
        self.status = CLIENT_CLOSED_REQUEST
        # HEAD is GET without the body of the response (RFC 9110 9.3.2), which uvicorn leaves out
        self._scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self._receive_message = receive
        self._send_message = send
        self._account = account
        self._config = config
        self._client = client
        self._first_messages: deque[Message] = deque()
        self._body_bytes = 0
        self._body_deadline = asyncio.get_running_loop().time() + config.limits.body_timeout
        self._body_is_complete = asyncio.Event()
        self._is_disconnected = asyncio.Event()
        self._is_started = False
        self._is_finished = False
        self._is_event_stream = False

    @property
    def route(self) -> str:
        """The path of the route, "unmatched" if there is none."""
        return getattr(self._scope.get("route"), "path", "unmatched")

    @property
    def outcome(self) -> Outcome:
        """How the response ended, as far as the connection and the status tell."""
        if not self._is_finished:
            return "client_left" if self._is_disconnected.is_set() else "server_error"
        if self.status < 400:
            return "complete"
        return FAILURE_OUTCOMES.get(self.status, "server_error") if self.status >= 500 else "refused"

    async def run(self, app: ASGIApp) -> None:
        """Run the application in a task that ends when the client leaves or the server cuts it."""
        if not _has_body(self._scope):
            self._first_messages.append({"type": "http.request", "body": b"", "more_body": False})
            self._body_is_complete.set()
        task = asyncio.create_task(self._run_app(app))
        watcher = asyncio.create_task(self._watch_client())
        self._account.task = task
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # also if uvicorn cancels this task
            for pending in (task, watcher):
                pending.cancel()
            await asyncio.wait({task, watcher})
            # asked for in every case: asyncio complains about an exception that nobody has seen
            http_error = self._describe(task)
            if not watcher.cancelled():
                watcher.exception()
            await self._account.close()
        if self._account.is_cut:
            self._account.outcome = "server_stopping"
            message = "the server is stopping and did not finish the request"
            headers = {**retry_after(_RESTART_SECONDS), **_CLOSE}
            await self._end(HttpError(503, message, type=SERVER_ERROR, code="shutting_down", headers=headers))
        elif http_error is not None:
            await self._end(http_error)

    async def _run_app(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._send)

    def _describe(self, task: asyncio.Task[None]) -> HttpError | None:
        """Return the response to an exception that no handler knew, and log it without the values in it."""
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, ClientDisconnect):
            return None
        assert isinstance(error, Exception)
        http_error = as_http_error(error, self._account.request_id)
        if http_error.code == "internal_error":
            text = describe_failure(error, with_messages=self._config.log_prompts)
            logger.error("request %s failed: %s", self._account.request_id, text)
        return http_error

    async def _end(self, error: HttpError) -> None:
        """Answer with an error, in the form that the response still allows."""
        if not self._is_started:
            response = error_response(error, megatron=self.route == "/api")
            await response(self._scope, self._receive_message, self._send)
        elif self._is_event_stream and not self._is_finished:
            event = b"data: " + orjson.dumps(error.body) + b"\n\n"
            await self._send_message({"type": "http.response.body", "body": event, "more_body": False})
        # else the response stays without its end, which the client notices: uvicorn closes the connection

    async def _watch_client(self) -> None:
        """Return when the client has closed the connection after its request."""
        await self._body_is_complete.wait()
        while (await self._receive_message())["type"] != "http.disconnect":
            pass
        self._is_disconnected.set()

    async def _receive(self) -> Message:
        """Return the next part of the body, within the limits of size and time.

        Raises:
            HttpError: 413, 408.
        """
        if self._first_messages:
            return self._first_messages.popleft()
        if self._body_is_complete.is_set():
            await self._is_disconnected.wait()
            return {"type": "http.disconnect"}
        limit = self._config.limits.body_bytes
        if _content_length(self._scope) > limit:
            raise _too_long(limit)
        try:
            async with asyncio.timeout_at(self._body_deadline):
                message = await self._receive_message()
        except TimeoutError:
            seconds = self._config.limits.body_timeout
            text = f"the body took longer than {seconds:g} seconds"
            raise HttpError(408, text, code="timeout", headers=_CLOSE) from None
        if message["type"] == "http.disconnect":
            self._is_disconnected.set()
        elif message["type"] == "http.request":
            self._body_bytes += len(message.get("body", b""))
            if self._body_bytes > limit:
                raise _too_long(limit)
            if not message.get("more_body", False):
                self._body_is_complete.set()
        return message

    async def _send(self, message: Message) -> None:
        """Send a message of the application, with the headers of every response."""
        if message["type"] == "http.response.start":
            self._is_started = True
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            self._is_event_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in headers
            )
            headers += [item for item in SECURITY_HEADERS.items() if item[0] not in names]
            headers += identity_headers(self._account.request_id, self._client)
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self._is_finished = True
        await self._send_message(message)


def _has_body(scope: Scope) -> bool:
    """Tell whether a body follows the headers (RFC 9112 6.3)."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _content_length(scope: Scope) -> int:
    """Return the length in the headers, which h11 has checked; 0 if there is none."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"the body is longer than {limit:,} bytes", code="body_too_long", headers=_CLOSE)
