"""POST /v1/responses: OpenAI's responses, without state: nothing of a request stays on the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from mega_schema.errors import RequestError
from mega_serve.api.bodies import Body, openapi_body, read_body
from mega_serve.api.chat_messages import ChatMessage
from mega_serve.api.context import ApiContext
from mega_serve.api.engine_calls import new_id, run_requests, stream_requests
from mega_serve.api.openai_chat import ChatBody, ChatJob, NewTokens, prepare_chat
from mega_serve.api.response_items import (
    InputItem,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
    TextOptions,
    as_tool_choice,
    merge_calls,
    name_text_field,
)
from mega_serve.api.response_stream import ResponseWriter
from mega_serve.api.sampling_fields import MAX_INT32, RequestFields, real
from mega_serve.api.services import ApiServices
from mega_serve.api.sse import encode_event, event_stream
from mega_serve.api.usage import Usage
from mega_serve.engine.requests import SequenceOutput

_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(Body):
    """The field `reasoning`, for templates that know it."""

    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    summary: None = None


class ResponsesBody(RequestFields):
    """The request of /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    temperature: float | None = real(0, 100)
    top_p: float | None = real(0, 1)
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    store: bool | None = Field(None, description="true is refused: the server stores nothing.")
    previous_response_id: str | None = Field(None, description="Refused: the server stores nothing.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None

    @property
    def text_format(self) -> TextFormat:
        return (self.text or TextOptions()).format or TextFormat()

    def as_chat(self) -> ChatBody:
        """Return the request as a chat.

        Raises:
            RequestError: a field needs a stored response, or an item lacks a field.
        """
        if self.store:
            raise RequestError("store", "the server stores no responses", found="true", hint='"store": false')
        if self.previous_response_id is not None:
            hint = "send the earlier items in input"
            raise RequestError("previous_response_id", "the server stores no responses", hint=hint)
        messages = []
        if self.instructions is not None:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            items = [item.as_message(position) for position, item in enumerate(self.input)]
            messages += merge_calls(items)
        wants_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        return ChatBody(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            response_format=self.text_format.as_response_format(),
            tools=None if self.tools is None else [tool.as_chat_tool() for tool in self.tools],
            tool_choice=as_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            logprobs=wants_logprobs,
            top_logprobs=self.top_logprobs if wants_logprobs else None,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


def build_router(context: ApiContext, services: ApiServices | None = None) -> APIRouter:
    """Return the route of responses."""
    services = services or ApiServices.from_context(context)
    router = APIRouter(tags=["OpenAI"])
    schema = openapi_body(
        ResponsesBody,
        text={"input": "What is the capital of France?", "max_output_tokens": 32},
        stream={"instructions": "Answer briefly.", "input": "What is the capital of France?", "stream": True},
    )

    @router.post("/v1/responses", openapi_extra=schema, summary="Create a response (stateless)")
    async def create_response(http_request: Request) -> Response:
        body = await read_body(ResponsesBody, http_request, lenient=context.lenient)
        try:
            job = await prepare_chat(context, services, body.as_chat(), param="input")
        except RequestError as error:
            param = name_text_field(str(error.where))
            raise RequestError(param, error.what, hint=error.hint, **error.values) from None
        writer = ResponseWriter(context, job, _echo(body, job))
        if body.stream:
            return await event_stream(_stream(context, http_request, job, writer), http_request)
        [result] = await run_requests(context, http_request, [job.request])
        [sequence] = result.sequences
        usage = Usage(len(job.request.prompt_token_ids), len(sequence.token_ids), result.cached_tokens)
        output = SequenceOutput(
            request_id=job.request.request_id,
            text=sequence.text,
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
        )
        list(writer.write(output))
        return Response(orjson.dumps(writer.response(usage)), media_type="application/json")

    return router


async def _stream(
    context: ApiContext, http_request: Request, job: ChatJob, writer: ResponseWriter
) -> AsyncGenerator[bytes, None]:
    usage = Usage(prompt_tokens=len(job.request.prompt_token_ids))
    is_started = False
    async with aclosing(stream_requests(context, http_request, [job.request])) as outputs:
        async for _, output in outputs:
            if not is_started:
                is_started = True
                for event in writer.begin():
                    yield encode_event(event, event["type"])
            usage.cached_tokens += output.cached_tokens
            usage.completion_tokens += len(output.token_ids)
            for event in writer.write(output):
                yield encode_event(event, event["type"])
    yield encode_event(event := writer.end(usage), event["type"])


def _echo(body: ResponsesBody, job: ChatJob) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    tools = [
        tool.model_dump(exclude={"parameters"}) | {"parameters": tool.parameters} for tool in body.tools or ()
    ]
    choice = body.tool_choice
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": job.created,
        "background": False,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": job.model,
        "parallel_tool_calls": bool(body.parallel_tool_calls),
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": body.text_format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, ResponsesToolChoice) else choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
