"""Serve a checkpoint by Ray Serve: every replica is a mega-serve without a port of its own.

    serve run mega_serve.deployment.ray_serve:app load=runs/whole dtype=bfloat16

Arguments are options of `mega-serve serve`, without the dashes. Needs the extra `mega-serve[ray]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import Receive, Scope, Send

from mega_serve.commands.engine_options import open_checkpoint
from mega_serve.commands.serve import build_application
from mega_serve.commands.server_options import build_config, build_limits
from mega_serve.deployment.arguments import parse_arguments
from mega_serve.process.engine_client import EngineProcessClient


class ReplicaApplication:
    """The ASGI application of a replica. Ray sends a copy to the replica, which starts the engine there.

    Args:
        values: parameters of the command `serve`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._client: EngineProcessClient | None = None
        self._app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or start and end with the replica."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert self._app is not None, "a request before the start"
        await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raise if the engine hangs or is dead: Ray then replaces the replica.

        An engine that is started again is not reported.

        Raises:
            RuntimeError
        """
        client = self._client
        if client is not None and client.status != "loading" and not client.is_alive:
            raise RuntimeError(f"the engine is {client.status}: {client.failure or 'it takes no steps'}")

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start the engine, and end it with the replica, which is ready once the model is loaded."""
        await receive()
        try:
            client = await self._start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await client.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> EngineProcessClient:
        values = dict(self._values)
        limits = build_limits(values)
        config = build_config(values, host="localhost", limits=limits, log_prompts=values["log_prompts"])
        client, application = build_application(values, config, open_checkpoint(values))
        self._client, self._app = client, application.asgi
        await client.start()
        if await client.wait_status("ready", "dead") == "dead":
            await client.close()
            raise RuntimeError(client.failure)
        return client


class Replica:
    """The class of the deployment; Ray adds the application to it as `app`."""

    app: ReplicaApplication

    async def check_health(self) -> None:
        """Raise if the replica must be replaced; Ray calls it."""
        self.app.check_health()


def app(args: dict[str, str]) -> serve.Application:
    """Return the Ray Serve application of the arguments `NAME=VALUE` of `serve run`.

    Raises:
        ConfigError: an argument is no option, or has a wrong value.
        LayoutError: `tp` or `pp` does not divide the model.
        FormatError: there is no checkpoint.
    """
    values = parse_arguments(args)
    open_checkpoint(values)  # a mistake is reported here, not in the log of a replica
    deployment = serve.deployment(name="mega-serve")(serve.ingress(ReplicaApplication(values))(Replica))
    return deployment.bind()
