"""Answer the requests of a batch by an HTTP application in the same process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from mega_serve.client.offline.openai_batch import BatchAnswer

Message = MutableMapping[str, Any]
AsgiApplication = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class AsgiHandler:
    """A BatchHandler around an ASGI application (asgi.readthedocs.io, version 3): the server's own.

    A batch then has the checks, the defaults and the answers of the server.
    """

    def __init__(self, app: AsgiApplication, headers: Mapping[str, str] | None = None) -> None:
        """Wrap an application whose lifespan has begun.

        Args:
            headers: of every request, such as Authorization.
        """
        self._app = app
        self._headers = {"host": "localhost", "content-type": "application/json", **(headers or {})}

    async def __call__(self, url: str, body: Mapping[str, Any]) -> BatchAnswer:
        """POST the body to the application and return its answer."""
        content = orjson.dumps(body)
        headers = {**self._headers, "content-length": str(len(content))}
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }
        exchange = _Exchange(content)
        await self._app(scope, exchange.receive, exchange.send)
        return exchange.answer()


class _Exchange:
    """The two channels of one request."""

    def __init__(self, content: bytes) -> None:
        self._messages = iter([{"type": "http.request", "body": content, "more_body": False}])
        self._disconnect = asyncio.Event()  # never set
        self._status = 500
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    async def receive(self) -> Message:
        """Return the body once; then wait, as for a client that stays connected."""
        message = next(self._messages, None)
        if message is None:
            await self._disconnect.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def answer(self) -> BatchAnswer:
        """Return the whole answer."""
        try:
            body = orjson.loads(self._body)
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            text = self._body.decode("utf-8", "replace")
            body = {"error": {"message": text, "type": "server_error", "param": None, "code": None}}
        try:
            retry_after = float(self._headers.get("retry-after", "1"))
        except ValueError:
            retry_after = 1.0
        return BatchAnswer(self._status, body, retry_after)
