"""Run the server and the engine process together, from the open port to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from mega_schema.errors import ConfigError
from mega_serve.engine.interfaces import ModelInfo
from mega_serve.http.server import Server
from mega_serve.process.engine_client import EngineProcessClient

EXIT_ENGINE_DIED = 1


async def serve_engine(
    client: EngineProcessClient,
    server: Server,
    listener: socket.socket,
    on_loaded: Callable[[ModelInfo], None],
) -> int:
    """Serve until a signal or the end of the engine. Return the exit code.

    Args:
        listener: a bound socket. It accepts connections at once; requests get 503 until the model is loaded.
        on_loaded: called when the engine is ready, again after each restart.

    Raises:
        ConfigError: the engine's factory refused its options.
    """
    await asyncio.sleep(0)  # asyncio cancels here after a Ctrl-C during the imports; nothing runs yet
    await client.start()
    watcher = asyncio.create_task(_watch_engine(client, server, on_loaded))
    try:
        await server.serve([listener])
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        failure = client.failure
        await client.close()
    if client.is_refused:
        raise EngineRefusedError(failure)
    return EXIT_ENGINE_DIED if failure else 0


class EngineRefusedError(ConfigError):
    """The engine process could not load the model; its line is the whole message."""

    def __init__(self, line: str) -> None:
        where, _, what = line.partition(": ")
        super().__init__(where, what)


async def _watch_engine(
    client: EngineProcessClient, server: Server, on_loaded: Callable[[ModelInfo], None]
) -> None:
    """Report each start of the engine; stop the server when it is dead for good."""
    while await client.wait_status("ready", "dead") == "ready":
        on_loaded(client.model)
        await client.wait_status("loading", "dead")
    server.stop()
