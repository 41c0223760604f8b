"""Server-sent events: a stream of JSON objects that ends when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mega_serve.api.context import Account
from mega_serve.api.engine_calls import ClientDisconnectedError, run_until_disconnect
from mega_serve.http.errors import as_http_error
from mega_serve.process.failure_log import describe_failure

logger = logging.getLogger("mega.serve")

KEEP_ALIVE_SECONDS = 15.0
# the engine refuses a request at once: wait a moment for that, so that the refusal has its own status
REFUSAL_SECONDS = 0.25
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"

T = TypeVar("T")


def encode_event(data: Mapping[str, Any], event: str = "") -> bytes:
    """Return an event with a JSON object, and a name if given."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + orjson.dumps(data) + b"\n\n"


async def event_stream(
    events: AsyncGenerator[bytes, None], http_request: Request, *, keep_alive: float = KEEP_ALIVE_SECONDS
) -> Response:
    """Return the response that sends the events as they come.

    An error before the first event is raised here and gets its own status; a later one becomes an event.

    Args:
        events: encoded events; closed when the client disconnects.
        keep_alive: seconds of silence after which a comment is sent.
    """
    first = asyncio.ensure_future(anext(events, None))
    try:
        await run_until_disconnect(http_request, _wait(first))
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    if first.done() and (error := first.exception()) is not None:
        raise error
    return _EventStream(events, first, http_request, keep_alive)


async def _wait(task: asyncio.Future[Any]) -> None:
    await asyncio.wait({task}, timeout=REFUSAL_SECONDS)


class _EventStream(Response):
    """A response that sends events until they end or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        first: asyncio.Future[bytes | None],
        http_request: Request,
        keep_alive: float,
    ) -> None:
        # a proxy must neither keep nor collect the events
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.first = first
        self.http_request = http_request
        self.keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def send_all() -> None:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await run_until_disconnect(self.http_request, send_all())
        except ClientDisconnectedError:
            logger.info("%s: the client disconnected from its stream", scope["path"])
        finally:
            self.first.cancel()
            await asyncio.gather(self.first, return_exceptions=True)
            await self.events.aclose()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events, a comment in every silence, and the error that ends them, if any."""
        try:
            pending = self.first
            while True:
                ready, _ = await asyncio.wait({pending}, timeout=self.keep_alive)
                if not ready:
                    yield _KEEP_ALIVE
                    continue
                event = pending.result()
                if event is None:
                    return
                yield event
                pending = self.first = asyncio.ensure_future(anext(self.events, None))
        except Exception as error:
            yield self._error_event(error)

    def _error_event(self, error: Exception) -> bytes:
        account: Account | None = getattr(self.http_request.state, "account", None)
        http_error = as_http_error(error, account.request_id if account else "")
        if account is not None:
            account.record_failure(error)
        if http_error.code == "internal_error":  # a dead engine has said why already
            logger.error("a stream failed: %s", describe_failure(error, with_messages=False))
        return encode_event({**http_error.body, "code": http_error.status})


async def append_done(events: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the events and then OpenAI's last one."""
    async for event in events:
        yield event
    yield DONE
