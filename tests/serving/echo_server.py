"""A server around the echo engine, with one streaming API: what serving tests start as a program.

python -m tests.serving.echo_server PORT '{"engine": {...}, "limits": {...}, ...}'
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mega_serve.api.context import ApiContext
from mega_serve.engine.interfaces import EngineClient
from mega_serve.engine.requests import EngineRequest, SamplingParams
from mega_serve.http.app import Application, create_app
from mega_serve.http.config import ServerConfig
from mega_serve.http.errors import as_http_error
from mega_serve.http.limits import Limits
from mega_serve.http.server import Server
from mega_serve.http.serving import serve_engine
from mega_serve.process.engine_client import EngineProcessClient, EngineSettings
from tests import fork_server

REPOSITORY = Path(__file__).parents[2]


def build_echo_router(context: ApiContext) -> APIRouter:
    """POST /echo: {"prompt", "max_tokens", "stream", "pad"} -> {"text"}, or one event per output."""
    router = APIRouter()

    @router.post("/echo")
    async def echo(http_request: Request) -> Response:
        body = json.loads(await http_request.body())
        account = http_request.state.account
        request = EngineRequest(
            request_id=account.request_id,
            prompt_token_ids=tuple(map(ord, body["prompt"])),
            params=SamplingParams(max_tokens=body.get("max_tokens", 4)),
            n=body.get("n", 1),
        )
        outputs = context.generate(request, http_request)
        if not body.get("stream"):
            return JSONResponse({"text": "".join([output.text async for output in outputs])})

        pad = "x" * body.get("pad", 0)

        async def events() -> AsyncIterator[str]:
            try:
                async for output in outputs:
                    yield f"data: {json.dumps({'text': output.text, 'pad': pad})}\n\n"
            except Exception as error:
                yield f"data: {json.dumps(as_http_error(error, account.request_id).body)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @router.post("/fail")
    async def fail(http_request: Request) -> Response:
        raise RuntimeError((await http_request.body()).decode())

    @router.post("/body")
    async def measure(http_request: Request) -> Response:
        return JSONResponse({"bytes": len(await http_request.body())})

    return router


def create_echo_app(client: EngineClient, config: ServerConfig, **options: Any) -> Application:
    """Assemble the application around the echo API. It has no tokenizer: nothing asks it."""
    context = ApiContext(client=client, tokenizer=None, limits=config.limits)  # type: ignore[arg-type]
    return create_app(client, config, apis=[build_echo_router(context)], **options)


def echo_settings(options: dict[str, Any], **settings: Any) -> EngineSettings:
    """Return the settings of an echo engine's process."""
    environment = {**os.environ, "PYTHONPATH": fork_server.module_path()}
    return EngineSettings(
        factory="tests.serving.echo_engine:build_echo_engine",
        options={"echo": True, **options},
        environment=environment,
        **settings,
    )


async def serve(listener: socket.socket, settings: dict[str, Any]) -> int:
    """Run the server until a signal."""
    limits = replace(Limits(), **settings.get("limits", {}))
    client = EngineProcessClient(
        echo_settings(settings.get("engine", {}), **{"first_delay": 0.1, **settings.get("process", {})})
    )
    application = create_echo_app(client, ServerConfig(limits=limits))
    server = Server(
        application,
        limits,
        on_ready=lambda: click.echo("listening"),
        drain_timeout=settings.get("drain_timeout", 30.0),
        certificate=settings.get("certificate"),
    )
    return await serve_engine(client, server, listener, lambda model: click.echo(f"loaded {model.name}"))


def main() -> None:
    """Run the program."""
    logging.basicConfig(level=logging.INFO)
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    click.echo(listener.getsockname()[1])
    sys.exit(asyncio.run(serve(listener, json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
