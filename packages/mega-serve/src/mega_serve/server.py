"""uvicorn around an application, on a socket that is already bound."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

_PATIENCE = 30  # seconds that requests in progress have to end in after a signal to stop


class Server(uvicorn.Server):
    """Says when it is ready. SIGTERM and SIGINT end it after the requests in progress.

    Args:
        ready: called once connections are taken.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=_PATIENCE,
            )
        )
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()
