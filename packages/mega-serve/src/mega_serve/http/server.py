"""Serve the application on a bound socket: deadlines of connections, and drain after SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from mega_serve.http.app import Application
from mega_serve.http.connections import GuardedConnection
from mega_serve.http.limits import Limits

logger = logging.getLogger("mega.serve")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CUT_SECONDS = 2.0  # for the responses to requests that were cut
_BACKLOG = 2048
_SPARE_DESCRIPTORS = 128  # for files, the engine's socket, the event loop


class Server(uvicorn.Server):
    """A uvicorn server that drains.

    The first SIGTERM or SIGINT: new requests to the APIs get 503 while the port still answers, requests in
    progress end by themselves or are cut after `drain_timeout`. The second one cuts them now. `run` returns.

    Args:
        on_ready: called once connections are accepted.
        drain_timeout: seconds.
        certificate: (certificate chain, private key) files for TLS.
    """

    def __init__(
        self,
        application: Application,
        limits: Limits,
        *,
        on_ready: Callable[[], None],
        drain_timeout: float = 30.0,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        certfile, keyfile = certificate or (None, None)
        super().__init__(
            uvicorn.Config(
                application.asgi,
                http="h11",  # GuardedConnection; see `startup`
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # X-Forwarded-For is anyone's claim
                backlog=_BACKLOG,
                timeout_keep_alive=int(limits.keep_alive),
                timeout_graceful_shutdown=int(_CUT_SECONDS),
                ssl_certfile=certfile,
                ssl_keyfile=keyfile,
            )
        )
        self._lifecycle = application.lifecycle
        self._client = application.client
        self._limits = limits
        self._on_ready = on_ready
        self._drain_timeout = drain_timeout
        self._drain_task: asyncio.Task[None] | None = None
        self._stop_now = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self.server_state.connections)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the sockets until a signal or `stop`."""
        self._loop = asyncio.get_running_loop()  # for a signal before the port accepts connections
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets. TLS handshakes have the deadline of headers."""
        assert sockets
        raise_descriptor_limit(self._limits.connections + _SPARE_DESCRIPTORS)
        await self.lifespan.startup()
        assert self._loop
        handshake_timeout = self._limits.header_timeout if self.config.ssl else None
        self.servers = [
            await self._loop.create_server(
                self._make_connection,
                sock=sock,
                ssl=self.config.ssl,
                backlog=_BACKLOG,
                ssl_handshake_timeout=handshake_timeout,
            )
            for sock in sockets
        ]
        self.started = True
        if self._lifecycle.is_draining:
            self._start_drain()
        else:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop now at the second."""
        assert self._loop
        if not self._lifecycle.is_draining:
            self._lifecycle.is_draining = True
            self._loop.call_soon_threadsafe(self.drain)
        else:
            self._loop.call_soon_threadsafe(self._stop_now.set)

    def stop(self) -> None:
        """Stop without waiting: there is no engine that could finish a request."""
        self._stop_now.set()
        self.drain()

    def drain(self) -> None:
        """Refuse new requests, wait for those in progress, then stop."""
        self._lifecycle.is_draining = True
        if self.started:  # else `startup` does it at its end: uvicorn cannot be left before
            self._start_drain()

    def _start_drain(self) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving. uvicorn would raise them again at the end: we exit with a code."""
        handlers = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    async def _drain(self) -> None:
        active = self._lifecycle.active_requests
        if not self._stop_now.is_set():
            logger.info("stopping: %d requests in progress, at most %g s", active, self._drain_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                while self._lifecycle.active_requests and not self._stop_now.is_set():
                    await asyncio.sleep(0.05)
        if self._lifecycle.active_requests:
            logger.info("cut %d requests", self._lifecycle.active_requests)
            self._lifecycle.cut_requests()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CUT_SECONDS):
                    while self._lifecycle.active_requests:
                        await asyncio.sleep(0.02)
        self.should_exit = True

    def _make_connection(self) -> asyncio.Protocol:
        return GuardedConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            self._loop,
            limits=self._limits,
            client=self._client,
        )


def raise_descriptor_limit(wanted: int) -> None:
    """Raise the soft limit of open descriptors, so that the cap on connections is reached first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
