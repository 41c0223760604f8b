"""`mega-serve generate` with the engine of the server, in a child process and without a socket."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mega_schema.errors import ConfigError
from mega_serve.commands.api_options import api_settings
from mega_serve.commands.engine_options import (
    ENGINE_FACTORY,
    engine_options,
    engine_settings,
    open_checkpoint,
)
from mega_serve.commands.generate import OfflineEngine, build_generate_command
from mega_serve.process.torchrun import TorchrunRank


@asynccontextmanager
async def open_engine(values: Mapping[str, Any]) -> AsyncIterator[OfflineEngine]:
    """Start the engine process; end it afterwards.

    Raises:
        ConfigError: torchrun started several processes.
        ConfigError: the chat template is not a text file.
        EngineRefusedError: the engine refuses its options, or cannot load the model.
    """
    from fastapi import FastAPI

    from mega_schema.tokenizer.tokenizer import open_tokenizer_folder
    from mega_serve.api.context import ApiContext
    from mega_serve.api.routers import build_routers
    from mega_serve.api.services import ApiServices
    from mega_serve.client.offline.asgi_handler import AsgiHandler
    from mega_serve.http.app import create_app
    from mega_serve.http.config import ServerConfig
    from mega_serve.http.limits import Limits
    from mega_serve.http.serving import EngineRefusedError
    from mega_serve.process.engine_client import EngineProcessClient, EngineSettings

    _refuse_torchrun()
    tokenizer = open_tokenizer_folder(open_checkpoint(values).tokenizer_folder)
    settings = api_settings(values, tokenizer)
    client = EngineProcessClient(
        EngineSettings(factory=ENGINE_FACTORY, options=engine_settings(values), restart=False)
    )
    # nobody else sends requests: what one asks for is bounded by the model's context alone
    limits = Limits(request_tokens=2**31, request_timeout=86_400.0)
    context = ApiContext(client=client, tokenizer=tokenizer, limits=limits, **settings)
    services = ApiServices.from_context(context)
    await client.start()
    try:
        if await client.wait_status("ready", "dead") == "dead":
            raise EngineRefusedError(client.failure)
        app: FastAPI = create_app(
            client, ServerConfig(limits=limits), apis=build_routers(context, services)
        ).asgi
        yield OfflineEngine(client, tokenizer.encode, AsgiHandler(app))
    finally:
        services.close()
        await client.close()


def _refuse_torchrun() -> None:
    """Refuse to write the same output in every process of torchrun.

    Raises:
        ConfigError: torchrun started several.
    """
    rank = TorchrunRank.from_environment(os.environ, os.getppid())
    if rank is not None and rank.world > 1:
        rank.leave_report_to_rank_0()
        what = "generate starts the ranks of --tp and --pp itself"
        raise ConfigError("WORLD_SIZE", what, found=rank.world, wanted=1, hint="mega-serve generate ...")


generate = build_generate_command(open_engine, [engine_options])
