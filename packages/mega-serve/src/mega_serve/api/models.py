"""GET /v1/models: the served model, as OpenAI's clients discover it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mega_serve.api.context import ApiContext
from mega_serve.api.sampling_fields import check_model, model_name


def build_router(context: ApiContext) -> APIRouter:
    """Return the routes of the model list."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", summary="List the served model")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(context)]}

    @router.get("/v1/models/{model_id:path}", summary="Describe the served model")
    async def get_model(model_id: str) -> dict[str, Any]:
        check_model(context, model_id)
        return _describe(context)

    return router


def _describe(context: ApiContext) -> dict[str, Any]:
    info = context.client.model
    return {
        "id": model_name(context),
        "object": "model",
        "created": info.created,
        "owned_by": "mega-serve",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_seq_len,
        "iteration": info.iteration,
    }
