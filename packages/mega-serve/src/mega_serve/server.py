"""Run an application with uvicorn on a socket that is already bound."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

_SHUTDOWN_TIMEOUT = 30  # seconds for the requests in progress after a signal to stop


class Server(uvicorn.Server):
    """A uvicorn server that reports when it accepts connections.

    SIGTERM and SIGINT stop it after the requests in progress.

    Args:
        on_ready: called once connections are accepted.
    """

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
            )
        )
        self.on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()
