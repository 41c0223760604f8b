"""JSON over HTTP with retries, for a server whose model is evaluated.

It uses Python's http.client, one kept connection per thread. It uses no proxy of the environment and follows
no redirection, so only the given address receives the API key.
"""

from __future__ import annotations

import email.utils
import http.client
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from mega_schema.errors import ConfigError, MegaError, escape_controls

logger = logging.getLogger("mega.eval")

RETRIES = 6
FIRST_DELAY = 0.5  # seconds; doubles with every retry
MAX_DELAY = 60.0  # seconds; also of a delay that the server asks for
CONNECT_TIMEOUT = 10.0  # seconds until the server accepts a connection
TIMEOUT = 600.0  # seconds without a byte from the server
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_ANSWER_BYTES = 1 << 30
_MAX_MESSAGE = 200  # characters of a server's message in ours


class EndpointError(MegaError):
    """A server refused a request, or its answer is not understood.

    Attributes:
        status: of the answer.
    """

    status: int | None = None


class NoAnswerError(EndpointError):
    """A server does not answer, or no more."""


class EndpointClient:
    """Sends requests to one server, from any number of threads.

    A request without answer is repeated only after the server has answered another one: an address without
    server is an error at once. Each wait is a line in the log, one for all threads that wait at a time.

    Args:
        url: http://HOST:PORT, with or without /v1 at its end.
        api_key: sent as a bearer token.
        retries: how often a request is repeated that got no answer, or one that says to come back.
        first_delay: seconds before the first repetition.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        retries: int = RETRIES,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            wanted = "http://HOST:PORT or https://HOST"
            raise ConfigError(
                "--url",
                "not the address of a server",
                found=url,
                wanted=wanted,
                hint="--url http://127.0.0.1:8000",
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = urlsplit(self.url).path
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._retries = retries
        self._first_delay = first_delay
        self._threads = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._is_closed = threading.Event()
        self._has_answered = False
        self._notice_lock = threading.Lock()
        self._notice_end = 0.0  # time.monotonic at which the wait of the last notice ends

    def get_json(self, path: str) -> Any:
        """GET an endpoint; errors are those of `send_json`."""
        return self.send_json("GET", path, None)

    def post_json(self, path: str, body: Mapping[str, object]) -> Any:
        """POST a JSON object; errors are those of `send_json`."""
        return self.send_json("POST", path, body)

    def send_json(self, method: str, path: str, body: object) -> Any:
        """Send a request and return the decoded JSON of the answer.

        Raises:
            NoAnswerError: there was none, after all retries, or at once from a server that never answered.
            EndpointError: the server refused the request, or its answer is not JSON.
        """
        content = b"" if body is None else orjson.dumps(body)
        for retry in range(self._retries + 1):
            delay = min(self._first_delay * 2**retry, MAX_DELAY)
            try:
                status, headers, answer = self._exchange(method, self._prefix + path, content)
            except (OSError, http.client.HTTPException) as error:
                problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if not self._has_answered:
                    raise self._no_server_error(problem) from None
            else:
                self._has_answered = True
                if status == 200:
                    return self._decode(path, answer)
                problem = f"status {status}: {_find_message(answer)}"
                if status not in _RETRIED:
                    raise self._refusal(path, status, problem)
                delay = _read_delay(headers.get("Retry-After"), delay)
            if retry == self._retries:
                break
            self._report_wait(problem, delay)
            if self._is_closed.wait(delay):
                break
        raise NoAnswerError(
            self.url + path,
            f"no answer after {retry + 1} requests",
            found=problem,
            hint="repeat the command to resume, once the server answers",
        )

    def _no_server_error(self, problem: str) -> NoAnswerError:
        port = "" if self._port is None else f" --port {self._port}"
        hint = f"mega-serve --load RUN{port} starts one; or name another --url"
        return NoAnswerError(self.url, "no server answers", found=problem, hint=hint)

    def _report_wait(self, problem: str, delay: float) -> None:
        """Log a wait, unless the last notice was of a wait that has not ended."""
        with self._notice_lock:
            now = time.monotonic()
            if now < self._notice_end:
                return
            self._notice_end = now + delay
        logger.warning("%s: %s; the next request is in %g s", self.url, escape_controls(problem), delay)

    def _exchange(self, method: str, path: str, content: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request over this thread's connection; a broken one is closed."""
        connection = getattr(self._threads, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
            connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT)
            self._threads.connection = connection
            self._connections.add(connection)
        try:
            if not connection.sock:
                connection.connect()
                connection.sock.settimeout(TIMEOUT)
            connection.request(method, path, content, self._headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read(_MAX_ANSWER_BYTES)
        except BaseException:
            connection.close()
            raise

    def _decode(self, path: str, answer: bytes) -> Any:
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError:
            found = answer[:_MAX_MESSAGE].decode(errors="replace")
            raise EndpointError(self.url + path, "the answer is not JSON", found=found) from None

    def _refusal(self, path: str, status: int, problem: str) -> EndpointError:
        hints = {
            401: "--api-key-env VARIABLE, which holds the key",
            403: "--api-key-env VARIABLE, which holds the key",
            404: "--url http://HOST:PORT of a server with /v1/completions, and --model as it names its model",
        }
        error = EndpointError(
            self.url + path, "the server refused the request", found=problem, hint=hints.get(status, "")
        )
        error.status = status
        return error

    def close(self) -> None:
        """Close all connections; requests that wait for an answer or for a retry end."""
        self._is_closed.set()
        for connection in self._connections:
            connection.close()


def _read_delay(header: str | None, default: float) -> float:
    """Return the seconds of a Retry-After header, which are a number or a date (RFC 9110 10.2.3)."""
    if header is None:
        return default
    if header.strip().isdecimal():
        return min(float(header), MAX_DELAY)
    try:
        date = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return default
    return min(max(date.timestamp() - time.time(), 0.0), MAX_DELAY)


def _find_message(answer: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the beginning of the answer."""
    text = answer.decode(errors="replace")
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text.split())[:_MAX_MESSAGE]
