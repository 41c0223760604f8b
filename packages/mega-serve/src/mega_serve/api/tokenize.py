"""POST /tokenize, POST /detokenize and GET /tokenizer_info, with vLLM's fields."""

from __future__ import annotations

import asyncio
import json
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from mega_schema.errors import RequestError
from mega_schema.tokenizer.special_tokens import SpecialTokens
from mega_schema.tokenizer.tokenizer import HF_CONFIG, FastTokenizer
from mega_serve.api.bodies import Body, openapi_body, read_body
from mega_serve.api.chat_messages import ChatMessage, ChatTool
from mega_serve.api.chat_templates import ChatTemplate, named_token_ids
from mega_serve.api.context import ApiContext
from mega_serve.api.prompts import check_token_ids, encode_texts, find_special_tokens
from mega_serve.api.sampling_fields import TokenId, check_model
from mega_serve.api.services import ApiServices
from mega_serve.api.template_options import TemplateOptions, render_messages

_SPECIAL_CHARS = 64  # longer texts are no special token


class TokenizeBody(Body):
    """The request of /tokenize: a prompt, or the messages of a chat."""

    other_names = MappingProxyType({"text": "prompt", "input": "prompt", "content": "prompt"})
    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=128)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages, whose template adds them."
    )
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateOptions | None = None


class DetokenizeBody(Body):
    """The request of /detokenize."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: list[TokenId]


def build_router(context: ApiContext, services: ApiServices | None = None) -> APIRouter:
    """Return the routes of the tokenizer."""
    services = services or ApiServices.from_context(context)
    router = APIRouter(tags=["Tokenizer"])
    special_tokens = find_special_tokens(context)
    tokenize_schema = openapi_body(
        TokenizeBody,
        prompt={"prompt": "Hello world", "add_special_tokens": False},
        messages={"messages": [{"role": "user", "content": "Hello"}]},
    )

    @router.post("/tokenize", openapi_extra=tokenize_schema, summary="Convert text to token ids")
    async def tokenize(http_request: Request) -> Response:
        body = await read_body(TokenizeBody, http_request, lenient=context.lenient)
        check_model(context, body.model)
        tokens = await _tokenize(context, services.template, special_tokens, body)
        strings = None
        if body.return_token_strs:
            strings = await asyncio.to_thread(context.tokenizer.pieces, tokens)
        return _json(
            {
                "count": len(tokens),
                "max_model_len": context.client.model.max_seq_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    detokenize_schema = openapi_body(DetokenizeBody, tokens={"tokens": [1, 2, 3]})

    @router.post("/detokenize", openapi_extra=detokenize_schema, summary="Convert token ids to text")
    async def detokenize(http_request: Request) -> Response:
        body = await read_body(DetokenizeBody, http_request, lenient=context.lenient)
        check_model(context, body.model)
        check_token_ids(context, body.tokens, "tokens")
        return _json({"prompt": await asyncio.to_thread(context.tokenizer.decode, body.tokens)})

    @router.get("/tokenizer_info", summary="Describe the tokenizer")
    async def get_tokenizer_info() -> Response:
        return _json(_describe(context))

    return router


async def _tokenize(
    context: ApiContext, template: ChatTemplate | None, special_tokens: SpecialTokens, body: TokenizeBody
) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt", "wanted prompt or messages, one of them")
    if body.messages is not None:
        _, ids = await render_messages(
            template,
            body.messages,
            tools=body.tools or (),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            options=body.chat_template_kwargs,
        )
        adds_special = body.add_special_tokens is True
        return [*special_tokens.prefix, *ids, *special_tokens.suffix] if adds_special else ids
    if body.add_special_tokens is False:
        special_tokens = SpecialTokens()
    prompt = body.prompt or ""
    if (
        len(prompt) <= _SPECIAL_CHARS
        and (token := named_token_ids(context.tokenizer).get(prompt)) is not None
    ):
        # clients ask for the id of eos_token in this way (lm-evaluation-harness); elsewhere in a text,
        # special tokens are letters
        return [token]
    [ids] = await encode_texts(context, [prompt], special_tokens=special_tokens)
    return ids


def _describe(context: ApiContext) -> dict[str, Any]:
    """Return tokenizer_config.json's keys; those of special tokens are there even without the file."""
    tokenizer = context.tokenizer
    identity = tokenizer.identity
    companions = tokenizer.companions if isinstance(tokenizer, FastTokenizer) else {}
    config: dict[str, Any] = json.loads(companions.get(HF_CONFIG, b"{}"))

    def name(token: int | None) -> str | None:
        return None if token is None else tokenizer.pieces([token])[0]

    # code that a checkpoint names is never run, and no client needs its name
    config = {key: value for key, value in config.items() if key != "auto_map"}
    return {
        **config,
        "tokenizer_class": config.get("tokenizer_class", identity.type),
        "vocab_size": identity.vocab_size,
        "model_max_length": context.client.model.max_seq_len,
        "eos_token": name(identity.eod),
        "bos_token": name(identity.bos),
        "pad_token": name(identity.pad),
        "eos_token_id": identity.eod,
        "bos_token_id": identity.bos,
        "pad_token_id": identity.pad,
        "chat_template": context.chat_template,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
