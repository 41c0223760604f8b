"""`mega-serve serve`: open the port, start the engine process, answer requests."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mega_schema.app.click_options import NumberRange, add_options
from mega_serve import __version__
from mega_serve.commands.api_options import api_settings, build_api_options, warn_of_template
from mega_serve.commands.engine_options import (
    ENGINE_FACTORY,
    engine_options,
    engine_settings,
    open_checkpoint,
)
from mega_serve.commands.option_groups import GroupedCommand, option_group
from mega_serve.commands.server_options import (
    build_certificate,
    build_config,
    build_limits,
    limit_options,
    security_options,
)
from mega_serve.http.config import ServerConfig
from mega_serve.process.torchrun import TorchrunRank

if TYPE_CHECKING:  # --help answers without these
    from fastapi import APIRouter

    from mega_schema.checkpoint.reader import Checkpoint
    from mega_serve.api.context import ApiContext
    from mega_serve.engine.interfaces import ModelInfo
    from mega_serve.http.app import Application
    from mega_serve.process.engine_client import EngineProcessClient

_CACHED_WORDS = 1000  # of the tokenizer, 7 MB at most

_server = option_group("Server")


def build_serve_command(
    engine_factory: str,
    build_apis: Callable[[ApiContext], Sequence[APIRouter]],
    build_pages: Callable[[], Sequence[APIRouter]] = tuple,
) -> click.Command:
    """Make the command.

    Args:
        engine_factory: `module:function` that the engine process calls with `engine_options`.
        build_apis: returns the routers of the APIs.
        build_pages: returns the routers of the web page.
    """

    @click.command(name="serve", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
    @engine_options
    @server_options
    @limit_options
    @security_options
    @click.version_option(__version__)
    def serve(**values: Any) -> None:
        """Serve text generation requests over HTTP with the checkpoint in DIR.

        PUT /api takes Megatron-LM's requests, /v1/... OpenAI's; GET / is a page. /docs lists all routes.

        \b
        Ranks of --tp and --pp are started by the server, or by torchrun:
          torchrun --nproc-per-node 4 -m mega_serve --load DIR --tp 2 --pp 2
        """
        sys.exit(asyncio.run(_serve(values, engine_factory, build_apis, build_pages)))

    return serve


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of the server and the APIs."""
    seconds = NumberRange(min=0, min_open=True)
    options = (
        _server(
            "--host",
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; 0.0.0.0 listens on all interfaces.",
        ),
        _server(
            "--port",
            default=5000,
            show_default=True,
            type=click.IntRange(0, 65535),
            help="Port to listen on; 0 selects a free port.",
        ),
        *build_api_options(_server),
        _server(
            "--megatron-legacy-status",
            is_flag=True,
            help="Answer bad requests as Megatron does: most with status 200 and a bare JSON string.",
        ),
        _server(
            "--log-prompts", is_flag=True, help='Log the prompts, except of requests with "no_log": true.'
        ),
        _server(
            "--drain-timeout",
            default=30.0,
            show_default=True,
            type=seconds,
            help="Seconds after SIGTERM for the requests in progress.",
        ),
        _server(
            "--engine-timeout",
            default=60.0,
            show_default=True,
            type=seconds,
            help="Seconds without a step after which the engine is taken for hung.",
        ),
        _server(
            "--no-restart", is_flag=True, help="Exit when the engine dies, instead of starting it again."
        ),
    )
    return add_options(command, options)


async def _serve(
    values: dict[str, Any],
    engine_factory: str,
    build_apis: Callable[[ApiContext], Sequence[APIRouter]],
    build_pages: Callable[[], Sequence[APIRouter]],
) -> int:
    """Run the server; under torchrun, only on rank 0. Return the exit code."""
    from mega_serve.http.listener import bind_listener

    rank = TorchrunRank.from_environment(os.environ, os.getppid())
    if rank is not None:
        rank.check_world(values["tp"], values["pp"])
        if rank.rank > 0:
            rank.become_worker(engine_settings(values))
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    host, log_prompts = values["host"], values["log_prompts"]
    limits = build_limits(values)
    config = build_config(values, host=host, limits=limits, log_prompts=log_prompts)
    certificate = build_certificate(values)
    with bind_listener(host, values["port"]) as listener:
        return await _serve_on(
            listener, values, config, certificate, rank, engine_factory, build_apis, build_pages
        )


async def _serve_on(
    listener: socket.socket,
    values: dict[str, Any],
    config: ServerConfig,
    certificate: tuple[str, str] | None,
    rank: TorchrunRank | None,
    engine_factory: str,
    build_apis: Callable[[ApiContext], Sequence[APIRouter]],
    build_pages: Callable[[], Sequence[APIRouter]],
) -> int:
    """Serve on a bound socket. Return the exit code."""
    from mega_serve.http.listener import listener_url
    from mega_serve.http.server import Server
    from mega_serve.http.serving import serve_engine

    checkpoint = open_checkpoint(values)
    client, application = build_application(
        values,
        config,
        checkpoint,
        engine_factory,
        build_apis,
        build_pages,
        rank=rank,
        connections=lambda: server.connections,
    )
    url = listener_url(listener, tls=certificate is not None)
    server = Server(
        application,
        config.limits,
        on_ready=lambda: click.echo(f"mega-serve: {url} loads the model", err=True),
        drain_timeout=values["drain_timeout"],
        certificate=certificate,
    )

    def report(model: ModelInfo) -> None:
        spec = checkpoint.spec
        what = f"{spec.family}, {spec.layers} layers, {model.max_seq_len:,} tokens of context"
        click.echo(f"mega-serve: {url} ready ({what}, iteration {model.iteration})")

    return await serve_engine(client, server, listener, report)


def build_application(
    values: Mapping[str, Any],
    config: ServerConfig,
    checkpoint: Checkpoint,
    engine_factory: str = ENGINE_FACTORY,
    build_apis: Callable[[ApiContext], Sequence[APIRouter]] | None = None,
    build_pages: Callable[[], Sequence[APIRouter]] | None = None,
    *,
    rank: TorchrunRank | None = None,
    connections: Callable[[], int] = lambda: 0,
) -> tuple[EngineProcessClient, Application]:
    """Return the client of an engine that is not started yet, and the application that asks it.

    Args:
        values: parameters of the command.
        build_apis, build_pages: None: all of them; see `build_serve_command`.
        rank: of torchrun.
        connections: returns the number of open connections, for a metric.
    """
    from mega_schema.tokenizer.tokenizer import FastTokenizer, open_tokenizer_folder
    from mega_serve.api.context import ApiContext
    from mega_serve.http.app import create_app
    from mega_serve.process.engine_client import EngineProcessClient, EngineSettings

    limits = config.limits
    options = engine_settings(values)
    if rank is not None and rank.world > 1:
        options["rendezvous"] = str(rank.folder)
    client = EngineProcessClient(
        EngineSettings(
            factory=engine_factory,
            options=options,
            queue_requests=limits.queue_requests,
            queue_tokens=limits.queue_tokens,
            heartbeat_timeout=values["engine_timeout"],
            log_prompts=config.log_prompts,
            restart=not values["no_restart"] and rank is None,  # torchrun restarts all ranks or none
        )
    )
    tokenizer = open_tokenizer_folder(checkpoint.tokenizer_folder)
    if isinstance(tokenizer, FastTokenizer):
        tokenizer.limit_cache(_CACHED_WORDS)
    context = ApiContext(
        client=client,
        tokenizer=tokenizer,
        limits=limits,
        log_prompts=config.log_prompts,
        legacy_status=values["megatron_legacy_status"],
        **api_settings(values, tokenizer),
    )
    if context.chat_template is not None and values["chat_template"] is None:
        # beside the loading of the model; a process starts for it
        check = (context.chat_template, tokenizer)
        threading.Thread(target=warn_of_template, args=check, name="template-check", daemon=True).start()
    application = create_app(
        client,
        config,
        apis=(build_apis or _build_apis)(context),
        pages=(build_pages or _build_pages)(),
        connections=connections,
    )
    return client, application


def _build_apis(context: ApiContext) -> list[APIRouter]:
    from mega_serve.api.routers import build_routers

    return build_routers(context)


def _build_pages() -> list[APIRouter]:
    from mega_serve.web.page_routes import build_router

    return [build_router()]


serve = build_serve_command(ENGINE_FACTORY, _build_apis, _build_pages)
