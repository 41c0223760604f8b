"""Connections that cannot hold the server: deadlines for headers, bodies and unread responses, and a cap.

uvicorn ends a connection that is idle between two requests; it has no deadline for a client that sends a byte
now and then (slowloris), or that leaves its response unread.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mega_serve.engine.interfaces import EngineClient
from mega_serve.http.accounts import REFUSAL, read_request_id
from mega_serve.http.errors import SERVER_ERROR, UNAVAILABLE_RETRY_SECONDS, HttpError, retry_after
from mega_serve.http.limits import Limits
from mega_serve.http.responses import encode_refusal

# the application answers 408 at the deadline of a body; a connection that is still open then is cut
_BODY_GRACE_SECONDS = 5.0


class GuardedConnection(H11Protocol):
    """An HTTP/1.1 connection with deadlines."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
        client: EngineClient,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._client = client
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._receives_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(
                HttpError(
                    503,
                    "too many connections",
                    type=SERVER_ERROR,
                    code="connection_limit",
                    headers=retry_after(UNAVAILABLE_RETRY_SECONDS),
                )
            )
            return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_receive_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read, or too slowly to drain the buffer by then."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """End the deadline: the client reads."""
        super().resume_writing()
        self._cancel_write_timer()

    def _update_timer(self) -> None:
        """Keep one deadline per part of a request: bytes that trickle in do not move it."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if self._receives_headers or self._receive_timer is None:
                self._cancel_receive_timer()
                seconds = self._limits.body_timeout + _BODY_GRACE_SECONDS
                self._receive_timer = self.loop.call_later(seconds, self.transport.abort)
        elif state is h11.IDLE:
            has_bytes = bool(self.conn.trailing_data[0])
            if has_bytes and not self._receives_headers:
                self._await_headers()
            elif not has_bytes:
                self._cancel_receive_timer()  # idle: uvicorn's keep-alive deadline runs
        else:
            self._cancel_receive_timer()

    def _await_headers(self) -> None:
        self._cancel_receive_timer()
        self._receives_headers = True
        self._receive_timer = self.loop.call_later(self._limits.header_timeout, self._refuse_late_headers)

    def _refuse_late_headers(self) -> None:
        if not self.transport.is_closing():
            if self.conn.trailing_data[0]:
                seconds = self._limits.header_timeout
                self._refuse(HttpError(408, f"the headers took longer than {seconds:g} s", code="timeout"))
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore Upgrade, as RFC 9110 7.8 allows; uvicorn would advise the operator to install WebSockets."""

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, in place of uvicorn's plain text."""
        # after the head of a response there is no room for another: the connection ends without its rest
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = HttpError(400, "not an HTTP/1.1 request", code="invalid_http")
            if self.conn.our_state is h11.SEND_RESPONSE:  # within the body of a request: for its audit line
                self.scope["state"][REFUSAL] = error.status
            self._refuse(error)
        self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        """Answer without the application, and close the connection."""
        self.transport.write(encode_refusal(error, read_request_id(None), self._client))
        self.transport.close()

    def _cancel_receive_timer(self) -> None:
        self._receives_headers = False
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
