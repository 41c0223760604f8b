"""POST /v1/chat/completions: OpenAI's chat completions, with vLLM's additions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from mega_schema.errors import RequestError
from mega_serve.api.bodies import openapi_body, read_body
from mega_serve.api.chat_messages import (
    ChatMessage,
    ChatTool,
    ToolChoice,
    check_tool_choice,
)
from mega_serve.api.chat_output import AssistantOutput, ToolMode, can_parse_calls
from mega_serve.api.context import ApiContext
from mega_serve.api.engine_calls import GeneratedResult, new_id, run_requests, stream_requests
from mega_serve.api.logprobs import chat_logprobs, prompt_logprobs
from mega_serve.api.prompts import check_length, default_new_tokens, truncate_prompts
from mega_serve.api.sampling_fields import SamplingFields, check_grammar, model_name
from mega_serve.api.services import ApiServices
from mega_serve.api.sse import append_done, encode_event, event_stream
from mega_serve.api.template_options import TemplateOptions, render_messages
from mega_serve.api.usage import Usage
from mega_serve.engine.requests import EngineRequest, GrammarSpec, SequenceOutput
from mega_serve.engine.tool_calls import tool_grammar

NewTokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ChatBody(SamplingFields):
    """The request of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def template_options(self) -> TemplateOptions:
        options = self.chat_template_kwargs or TemplateOptions()
        if self.reasoning_effort is None:
            return options
        return options.model_copy(update={"reasoning_effort": self.reasoning_effort})


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A checked request and the engine's.

    Attributes:
        top: number of most probable words per token; None reports no log-probabilities.
    """

    body: ChatBody
    completion_id: str
    created: int
    model: str
    mode: ToolMode
    request: EngineRequest
    top: int | None

    def envelope(self, kind: str) -> dict[str, Any]:
        """Return the fields that every object of the response has."""
        return {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}


def build_router(context: ApiContext, services: ApiServices | None = None) -> APIRouter:
    """Return the route of chat completions."""
    services = services or ApiServices.from_context(context)
    router = APIRouter(tags=["OpenAI"])
    user = {"role": "user", "content": "What is the capital of France?"}
    schema = openapi_body(
        ChatBody,
        chat={"messages": [{"role": "system", "content": "Answer briefly."}, user], "max_tokens": 32},
        stream={"messages": [user], "stream": True},
        json={"messages": [user], "response_format": {"type": "json_object"}},
    )

    @router.post("/v1/chat/completions", openapi_extra=schema, summary="Continue a chat")
    @router.post("/chat/completions", include_in_schema=False)
    async def create_chat_completion(http_request: Request) -> Response:
        body = await read_body(ChatBody, http_request, lenient=context.lenient)
        job = await prepare_chat(context, services, body)
        if body.stream:
            return await event_stream(append_done(_stream(context, http_request, job)), http_request)
        [result] = await run_requests(context, http_request, [job.request])
        return Response(orjson.dumps(_response(context, job, result)), media_type="application/json")

    return router


async def prepare_chat(context: ApiContext, services: ApiServices, body: ChatBody) -> ChatJob:
    """Check the request, render and encode its messages and build the engine's request.

    Raises:
        HttpError, RequestError: the request is refused.
    """
    body.check_shared(context)
    top = _top_logprobs(context, body)
    mode, grammar = tool_plan(context, body.tools or (), body.tool_choice, bool(body.parallel_tool_calls))
    text_grammar = body.grammar(context)
    if grammar is not None and text_grammar is not None:
        raise RequestError("response_format", "excludes a forced tool call", hint='"tool_choice": "auto"')
    grammar = grammar or text_grammar
    await services.grammars.check(grammar)
    _, ids = await render_messages(
        services.template,
        body.messages,
        tools=() if body.tool_choice == "none" else body.tools or (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        options=body.template_options,
    )
    n = body.n or 1
    max_tokens = body.max_completion_tokens or body.max_tokens
    [ids] = truncate_prompts(context, [ids], body.truncate_prompt_tokens, max_tokens or 1)
    if max_tokens is None:
        max_tokens = default_new_tokens(context, len(ids), n)
    check_length(context, [ids], max_tokens, n)
    completion_id = new_id("chatcmpl")
    params = body.sampling_params(context, max_tokens=max_tokens, logprobs=top, grammar=grammar)
    request = EngineRequest(
        request_id=completion_id,
        prompt_token_ids=tuple(ids),
        params=params,
        n=n,
        priority=body.priority or 0,
        cache_namespace=body.cache_salt or "",
    )
    created = int(services.clock())
    return ChatJob(body, completion_id, created, model_name(context), mode, request, top)


def tool_plan(
    context: ApiContext, tools: Sequence[ChatTool], choice: ToolChoice | None, parallel: bool
) -> tuple[ToolMode, GrammarSpec | None]:
    """Return how calls are read from the text, and the grammar that forces them.

    Raises:
        RequestError: the choice has no tool, or the template does not say how the model writes calls.
    """
    name = check_tool_choice(tools, choice)
    if name == "none":
        return "text", None
    if name == "auto":
        if not tools:
            return "text", None
        if not can_parse_calls(context.chat_template or ""):
            what = "the chat template does not say how the model calls tools"
            raise RequestError(
                "tool_choice", what, hint='"tool_choice": "required", or the name of a function'
            )
        return "auto", None
    wanted = "required" if name == "required" else {"type": "function", "function": {"name": name}}
    is_parallel = parallel and name == "required"
    spec = tool_grammar([tool.as_dict() for tool in tools], wanted, parallel=is_parallel)
    return "forced", check_grammar(context, spec)


def _top_logprobs(context: ApiContext, body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs", "needs logprobs", hint='"logprobs": true')
        return None
    top = body.top_logprobs or 0
    if top > context.limits.logprobs:
        wanted = f"at most {context.limits.logprobs}"
        raise RequestError("top_logprobs", "above the server's limit", found=top, wanted=wanted)
    return top


def _response(context: ApiContext, job: ChatJob, result: GeneratedResult) -> dict[str, Any]:
    usage = Usage()
    usage.add_prompt(len(job.request.prompt_token_ids), result.cached_tokens)
    choices = []
    for index, sequence in enumerate(result.sequences):
        usage.completion_tokens += len(sequence.token_ids)
        message = AssistantOutput(job.mode)
        message.append(sequence.text, is_last=True)
        logprobs = None
        if job.top is not None:
            logprobs = chat_logprobs(context.tokenizer, sequence.logprobs, job.top)
        choices.append(
            {
                "index": index,
                "message": message.message(),
                "logprobs": logprobs,
                "finish_reason": message.finish_reason(sequence.finish_reason),
                "stop_reason": sequence.stop_reason,
                **({"token_ids": sequence.token_ids} if job.body.return_token_ids else {}),
            }
        )
    response = {**job.envelope("chat.completion"), "choices": choices, "usage": usage.as_dict()}
    if job.body.return_token_ids:
        response["prompt_token_ids"] = job.request.prompt_token_ids
    if job.body.prompt_logprobs is not None:
        top = job.body.prompt_logprobs
        response["prompt_logprobs"] = prompt_logprobs(context.tokenizer, result.prompt_logprobs, top)
    return response


async def _stream(context: ApiContext, http_request: Request, job: ChatJob) -> AsyncGenerator[bytes, None]:
    """Yield the role of every choice, its text and calls, and the usage if asked."""
    messages = [AssistantOutput(job.mode) for _ in range(job.request.n)]
    is_started = [False] * job.request.n
    usage = Usage(prompt_tokens=len(job.request.prompt_token_ids))
    envelope = job.envelope("chat.completion.chunk")
    extra: dict[str, Any] = {"usage": None} if job.body.include_usage else {}
    async with aclosing(stream_requests(context, http_request, [job.request])) as outputs:
        async for _, output in outputs:
            usage.cached_tokens += output.cached_tokens
            usage.completion_tokens += len(output.token_ids)
            if job.body.has_continuous_usage:
                extra = {"usage": usage.as_dict()}
            if not is_started[output.index]:
                is_started[output.index] = True
                delta = {"role": "assistant", "content": ""}
                choice = {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
                prompt = (
                    {"prompt_token_ids": job.request.prompt_token_ids} if job.body.return_token_ids else {}
                )
                yield encode_event({**envelope, "choices": [choice], **prompt, **extra})
            choice = _stream_choice(context, job, messages[output.index], output)
            if choice["delta"] or choice["logprobs"] or choice["finish_reason"] or choice.get("token_ids"):
                yield encode_event({**envelope, "choices": [choice], **extra})
    if job.body.include_usage:
        yield encode_event({**envelope, "choices": [], "usage": usage.as_dict()})


def _stream_choice(
    context: ApiContext, job: ChatJob, message: AssistantOutput, output: SequenceOutput
) -> dict[str, Any]:
    gained = message.append(output.text, is_last=output.finish_reason is not None)
    delta: dict[str, Any] = {}
    if gained.content:
        delta["content"] = gained.content
    if gained.calls:
        delta["tool_calls"] = message.call_deltas(gained)
    logprobs = None
    if job.top is not None and output.logprobs:
        logprobs = chat_logprobs(context.tokenizer, output.logprobs, job.top)
    return {
        "index": output.index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": message.finish_reason(output.finish_reason),
        "stop_reason": output.stop_reason,
        **({"token_ids": output.token_ids} if job.body.return_token_ids else {}),
    }
