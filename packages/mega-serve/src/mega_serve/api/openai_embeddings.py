"""POST /v1/embeddings: OpenAI's embeddings, of the model's hidden states after the final norm."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field

from mega_schema.errors import RequestError
from mega_schema.tokenizer.special_tokens import SpecialTokens
from mega_serve.api.bodies import openapi_body, read_body
from mega_serve.api.context import ApiContext
from mega_serve.api.engine_calls import new_id, run_requests
from mega_serve.api.prompts import (
    Prompt,
    check_length,
    check_prompt_count,
    encode_prompts,
    find_special_tokens,
    truncate_prompts,
)
from mega_serve.api.sampling_fields import MAX_INT32, RequestFields, TruncatedTokens, check_model, model_name
from mega_serve.api.services import ApiServices
from mega_serve.engine.requests import EngineRequest, SamplingParams
from mega_serve.http.errors import SERVER_ERROR, HttpError


class EmbeddingBody(RequestFields):
    """The request of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description='"base64" is float32, little-endian.'
    )
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = Field(
        None, description="Keep only the first dimensions of the embedding."
    )
    normalize: bool | None = Field(None, description="Divide the embedding by its length. Default: true.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's BOS, as Hugging Face does.")
    truncate_prompt_tokens: TruncatedTokens | None = None


def build_router(context: ApiContext, services: ApiServices | None = None) -> APIRouter:
    """Return the route of embeddings. It needs no service; all routers are built alike."""
    router = APIRouter(tags=["OpenAI"])
    special_tokens = find_special_tokens(context)
    schema = openapi_body(
        EmbeddingBody,
        text={"input": "Once upon a time"},
        texts={"input": ["Once upon a time", "The end"], "encoding_format": "base64"},
        ids={"input": [1, 2, 3], "normalize": False},
    )

    @router.post("/v1/embeddings", openapi_extra=schema, summary="Embed text")
    @router.post("/embeddings", include_in_schema=False)
    async def create_embeddings(http_request: Request) -> Response:
        body = await read_body(EmbeddingBody, http_request, lenient=context.lenient)
        requests = await _prepare(context, body, special_tokens)
        results = await run_requests(context, http_request, requests)
        rows = [result.sequences[0].embedding for result in results]
        answer = _response(context, body, requests, rows)
        # of numpy's float32 orjson writes the shortest digits, half as many
        content = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, media_type="application/json")

    return router


async def _prepare(
    context: ApiContext, body: EmbeddingBody, special_tokens: SpecialTokens
) -> list[EngineRequest]:
    """Check the request, encode its texts and build the engine's requests."""
    check_model(context, body.model)
    width = context.client.model.hidden_size
    if (body.dimensions or 0) > width:
        wanted = f"at most {width}"
        raise RequestError("dimensions", "more than the model has", found=body.dimensions, wanted=wanted)
    check_prompt_count(context, body.input, "input")
    around = special_tokens if body.add_special_tokens else SpecialTokens()
    _, rows = await encode_prompts(context, body.input, around, param="input")
    rows = truncate_prompts(context, rows, body.truncate_prompt_tokens, 0)
    check_length(context, rows, 0, 1, param="input")
    request_id = new_id("embd")
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=tuple(row),
            params=SamplingParams(max_tokens=0, temperature=0.0, pooling=context.pooling),
            priority=body.priority or 0,
            cache_namespace=body.cache_salt or "",
        )
        for index, row in enumerate(rows)
    ]


def _response(
    context: ApiContext,
    body: EmbeddingBody,
    requests: Sequence[EngineRequest],
    rows: Sequence[Sequence[float]],
) -> dict[str, Any]:
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode_row(body, row)}
            for index, row in enumerate(rows)
        ],
        "model": model_name(context),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encode_row(body: EmbeddingBody, values: Sequence[float]) -> str | NDArray[np.float32]:
    """Return an embedding in the form that the client asks for.

    Raises:
        HttpError: 500, the model computed no finite number, which JSON cannot say.
    """
    row = np.asarray(values, np.float64)[: body.dimensions]
    if not np.isfinite(row).all():
        raise HttpError(500, "the embedding is not finite", type=SERVER_ERROR, code="not_finite")
    if body.normalize is not False:
        row = row / max(float(np.linalg.norm(row)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return row.astype(np.float32)
