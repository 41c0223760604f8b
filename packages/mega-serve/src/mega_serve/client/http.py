"""A small client of OpenAI-compatible servers and of Megatron's `PUT /api`.

aiohttp sends the requests. It reads a streamed answer in a quarter of the CPU time of httpx (32 streams: 33
against 123 microseconds a chunk), and a load generator must not be slower than the server it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import aiohttp
import orjson

from mega_schema.errors import ConfigError, MegaError
from mega_serve.client.server_address import ServerAddress
from mega_serve.client.server_sent_events import EventParser

API_KEY_VARIABLES: Final = ("MEGA_API_KEY", "OPENAI_API_KEY")
_DONE: Final = b"[DONE]"
_MAX_MESSAGE: Final = 300  # characters of a server's message in ours
_MAX_ANSWER_BYTES: Final = 256 << 20
_MAX_KEY_BYTES: Final = 4096
_NAMED_KEY: Final = re.compile(rb"[A-Za-z0-9_.-]{1,64}:(?P<key>.+)")  # a line of the server's file
_READY_INTERVAL: Final = 1.0  # seconds between two questions to a server that starts
_DRAIN_SECONDS: Final = 1.0


class ServerError(MegaError):
    """A server cannot be reached, refused a request, or sent an answer that is not understood.

    Attributes:
        status: the HTTP status; None if there was no answer, or if the error came inside a stream.
        retry_after: seconds to wait that the server asked for.
        text: the message alone, without URL and hint.
    """

    status: int | None = None
    retry_after: float | None = None
    text: str = ""


class StreamEvent(NamedTuple):
    """A chunk of a streamed answer.

    Attributes:
        data: the decoded JSON object.
        received_at: the client's clock when the bytes had arrived.
    """

    data: dict[str, Any]
    received_at: float


def read_api_key(key_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the API key of the file, or else of MEGA_API_KEY or OPENAI_API_KEY; None if there is none.

    The file may be the server's: of its first line `NAME:KEY`, blank lines and comments aside, KEY counts.

    Raises:
        ConfigError: the file has no key, or the hash of one.
    """
    if key_file is None:
        return next((environment[name] for name in API_KEY_VARIABLES if environment.get(name)), None)
    with key_file.open("rb") as file:
        lines = [line.strip() for line in file.read(_MAX_KEY_BYTES).splitlines()]
    line = next((line for line in lines if line and not line.startswith(b"#")), b"")
    match = _NAMED_KEY.fullmatch(line)
    try:
        key = (match["key"] if match else line).decode("ascii")
    except UnicodeDecodeError:
        key = ""
    if not key.isprintable() or not key:
        wanted = "a line with KEY or NAME:KEY"
        raise ConfigError("--api-key-file", "has no API key", found=key_file, wanted=wanted)
    if match and key.startswith("sha256:"):
        what = "has the hash of a key"
        raise ConfigError("--api-key-file", what, found=key_file, wanted="the key itself")
    return key


class ServerClient:
    """Sends requests to one server. Use as an async context manager.

    It uses no proxy of the environment and follows no redirection, so only the given address receives the API
    key.
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = 600.0,
        verify_tls: bool = True,
        keeps_connections: bool = True,
        megatron_option: str = "",
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare a client; nothing is sent.

        Args:
            headers: sent with every request.
            timeout: seconds without a byte from the server before a request fails; None: no limit.
            keeps_connections: reuse connections. A client that pauses between requests does not: the server
                may have closed them.
            megatron_option: of the command, selects `PUT /api`; for a hint.
            now: the clock of `StreamEvent.received_at`.
        """
        self.address = address
        self.now = now
        self._headers = dict(headers or {})
        if api_key:
            self._headers.setdefault("Authorization", f"Bearer {api_key}")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout)
        self._verify_tls = verify_tls
        self._keeps_connections = keeps_connections
        self._megatron_option = megatron_option
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            limit=0, ssl=self._verify_tls, force_close=not self._keeps_connections
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get_json(self, path: str) -> Any:
        """GET an endpoint and return the decoded JSON.

        Raises:
            ServerError: the request failed.
        """
        return await self.send_json("GET", path, None)

    async def send_json(
        self, method: str, path: str, body: object, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Send a JSON body and return the decoded JSON of the answer.

        Raises:
            ServerError: the request failed, or the answer is not JSON.
        """
        async with self._open(method, path, body, headers) as response:
            content = await _read_limited(response)
            try:
                return orjson.loads(content)
            except orjson.JSONDecodeError:
                raise _error(self.address.url(path), "the answer is not JSON", _shorten(content)) from None

    async def stream_events(
        self, path: str, body: object, *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[StreamEvent]:
        """POST a JSON body and yield the JSON objects of the streamed answer until [DONE].

        Closing the iterator, or cancelling its task, closes the connection: the server then stops the work.
        Without [DONE], as from `transformers serve`, a stream is whole once every choice has its
        finish_reason.

        Raises:
            ServerError: the request failed, an error event came, or the stream ended too early.
        """
        url = self.address.url(path)
        async with self._open("POST", path, body, headers) as response:
            if response.content_type != "text/event-stream":
                content = await _read_limited(response)
                raise _error(url, f"the answer is {response.content_type}, not a stream", _shorten(content))
            parser = EventParser()
            finished: dict[int, bool] = {}
            async for received in response.content.iter_any():
                received_at = self.now()
                for event in parser.feed(received):
                    if event.data == _DONE:
                        await _drain(response)
                        return
                    data = _decode_event(url, event.data, event.name)
                    for choice in data.get("choices") or ():
                        finished[choice.get("index", 0)] = bool(choice.get("finish_reason"))
                    yield StreamEvent(data, received_at)
        if finished and all(finished.values()):
            return
        hint = "the server stopped or was restarted: look at its log"
        raise _error(url, "the stream ended before its end mark, data: [DONE]", hint=hint)

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait until `GET /health` or `GET /v1/models` has status 200.

        Args:
            timeout: seconds; 0 asks once.

        Raises:
            ServerError: the last error, after the timeout.
        """
        end = self.now() + timeout
        while True:
            for path in ("/health", "/v1/models"):
                try:
                    async with self._open("GET", path, None, None):
                        return
                except ServerError as error:
                    last_error = error
            if self.now() >= end:
                raise last_error
            await asyncio.sleep(_READY_INTERVAL)

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, body: object, headers: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its answer of status 200."""
        assert self._session is not None, "the client is not open"
        url = self.address.url(path)
        data = None if body is None else orjson.dumps(body)
        all_headers = {"Content-Type": "application/json", **(headers or {})} if data is not None else headers
        try:
            async with self._session.request(
                method, url, data=data, headers=all_headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise _refusal(url, response, await _read_limited(response), self._megatron_option)
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            hint = "--insecure accepts a self-signed certificate"
            raise _error(url, "the certificate is not trusted", str(error.certificate_error), hint) from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, ssl.SSLError) as error:
            cause = getattr(error, "os_error", error)
            # asyncio's own text repeats the address
            code = getattr(cause, "errno", None)
            text = str(cause) if code is None or code < 0 else os.strerror(code)
            hint = "is it running? mega-serve prints its address when it is ready"
            raise _error(url, "no server answers", text, hint) from None
        except TimeoutError:
            wait = self._timeout.sock_read
            raise _error(url, f"no byte for {wait:g} seconds" if wait else "timed out") from None
        except aiohttp.ClientError as error:
            raise _error(url, "the connection broke", str(error) or type(error).__name__) from None


def error_text(body: object) -> str:
    """Return the message of a decoded error: an OpenAI object, Megatron's {"message"} or bare string."""
    if isinstance(body, str):
        return body
    if isinstance(body, dict):
        for key in ("error", "message", "detail"):
            value = body.get(key)
            if isinstance(value, dict) and isinstance(value.get("message"), str):
                return str(value["message"])
            if isinstance(value, str):
                return value
    return ""


def _decode_event(url: str, data: bytes, name: str) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise _error(url, "an event of the stream is not JSON", _shorten(data)) from None
    if name == "error" or (isinstance(value, dict) and value.get("error")):
        raise _message_error(url, "the server stopped the answer", error_text(value) or _shorten(data))
    if not isinstance(value, dict):
        raise _error(url, "an event of the stream is not a JSON object", _shorten(data))
    return value


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a stream, so that its connection can be used again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while await response.content.readany():
                pass


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for block in response.content.iter_any():
        content += block
        if len(content) > _MAX_ANSWER_BYTES:
            raise _error(str(response.url), "the answer is too long", wanted="at most 256 MiB")
    return bytes(content)


def _refusal(url: str, response: aiohttp.ClientResponse, content: bytes, megatron_option: str) -> ServerError:
    """Return the error of an answer with a status other than 200."""
    try:
        text = error_text(orjson.loads(content))
    except orjson.JSONDecodeError:
        text = ""
    retry_after = _seconds(response.headers.get("Retry-After"))
    hint = {
        401: f"set {API_KEY_VARIABLES[0]}, or name a file with --api-key-file",
        403: "is the API key the right one?",
        404: _hint_at_address(text, megatron_option),
        405: "does this server have this API?",
        429: f"retry in {retry_after:g} s" if retry_after else "retry later",
        503: f"retry in {retry_after:g} s" if retry_after else "the server loads or stops: retry later",
    }.get(response.status, "")
    message = text or _shorten(content)
    error = _message_error(url, f"refused with status {response.status}", message, hint)
    error.status = response.status
    error.retry_after = retry_after
    return error


def _hint_at_address(text: str, megatron_option: str) -> str:
    if "model" in text.lower():
        return ""  # the server has the API, and not the model
    alternative = f" {megatron_option} speaks to a server that has only PUT /api" if megatron_option else ""
    return f"is the address right?{alternative}"


def _message_error(url: str, what: str, message: str, hint: str = "") -> ServerError:
    """Return an error with the words of the server, whose own hint counts before ours."""
    has_hint = "hint: " in message
    error = ServerError(url, f"{what}: {_cut(message)}" if message else what, hint="" if has_hint else hint)
    error.text = message or what
    return error


def _error(url: str, what: str, found: str = "", hint: str = "", wanted: str = "") -> ServerError:
    values: dict[str, Any] = {name: v for name, v in (("found", found), ("wanted", wanted)) if v}
    if found:
        values["found"] = _cut(found)
    error = ServerError(url, what, hint=hint, **values)
    error.text = found or what
    return error


def _cut(text: str) -> str:
    return f"{text[:_MAX_MESSAGE]}{'...' if len(text) > _MAX_MESSAGE else ''}"


def _shorten(content: bytes) -> str:
    text = " ".join(content[: 4 * _MAX_MESSAGE].decode("utf-8", "replace").split())
    return text[:_MAX_MESSAGE]


def _seconds(value: str | None) -> float | None:
    """Return a Retry-After header in seconds; None for a date, or if it is absent."""
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
