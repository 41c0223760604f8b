"""All APIs of the server."""

from __future__ import annotations

from fastapi import APIRouter

from mega_serve.api import (
    megatron_routes,
    models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    tokenize,
)
from mega_serve.api.context import ApiContext
from mega_serve.api.services import ApiServices


def build_routers(context: ApiContext, services: ApiServices | None = None) -> list[APIRouter]:
    """Return the routers of all APIs, which share one chat template's process.

    Args:
        services: to close when the server ends; by default new ones, which end with it.
    """
    services = services or ApiServices.from_context(context)
    modules = (
        megatron_routes,
        openai_completions,
        openai_chat,
        openai_responses,
        openai_embeddings,
        tokenize,
    )
    return [*(module.build_router(context, services) for module in modules), models.build_router(context)]
