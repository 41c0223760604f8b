"""POST /v1/completions: OpenAI's text completions, with vLLM's additions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from mega_schema.errors import RequestError
from mega_schema.tokenizer.special_tokens import SpecialTokens
from mega_serve.api.bodies import openapi_body, read_body
from mega_serve.api.context import ApiContext
from mega_serve.api.engine_calls import GeneratedResult, new_id, run_requests, stream_requests
from mega_serve.api.logprobs import CompletionLogprobs, prompt_logprobs
from mega_serve.api.prompts import (
    Prompt,
    check_length,
    check_prompt_count,
    encode_prompts,
    find_special_tokens,
    truncate_prompts,
)
from mega_serve.api.sampling_fields import SamplingFields, TokenCount, model_name
from mega_serve.api.services import ApiServices
from mega_serve.api.sse import append_done, encode_event, event_stream
from mega_serve.api.usage import Usage
from mega_serve.engine.requests import EngineRequest, SequenceOutput

DEFAULT_MAX_TOKENS = 16


class CompletionBody(SamplingFields):
    """The request of /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    max_tokens: TokenCount | None = None
    best_of: int | None = Field(None, description="Refused.")
    suffix: str | None = Field(None, description="Refused.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's BOS, as Hugging Face does.")

    @property
    def new_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


@dataclass(slots=True)
class _Job:
    """A checked request, with its prompts as ids.

    Attributes:
        texts: the prompts as text, for `echo`.
    """

    body: CompletionBody
    completion_id: str
    created: int
    model: str
    texts: Sequence[str]
    rows: Sequence[Sequence[int]]
    requests: Sequence[EngineRequest] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.body.n or 1


def build_router(context: ApiContext, services: ApiServices | None = None) -> APIRouter:
    """Return the route of text completions."""
    services = services or ApiServices.from_context(context)
    router = APIRouter(tags=["OpenAI"])
    special_tokens = find_special_tokens(context)
    schema = openapi_body(
        CompletionBody,
        generate={"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0.8},
        stream={"prompt": "Once upon a time", "stream": True, "stream_options": {"include_usage": True}},
        structural_tag={
            "prompt": "Call <f=add>",
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f=add>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f="],
            },
        },
        score={"prompt": "Hello world", "max_tokens": 0, "echo": True, "logprobs": 1},
    )

    @router.post("/v1/completions", openapi_extra=schema, summary="Complete text")
    @router.post("/completions", include_in_schema=False)
    async def create_completion(http_request: Request) -> Response:
        body = await read_body(CompletionBody, http_request, lenient=context.lenient)
        job = await _prepare(context, body, special_tokens, int(services.clock()))
        await services.grammars.check(body.grammar(context))
        if body.stream:
            return await event_stream(append_done(_stream(context, http_request, job)), http_request)
        results = await run_requests(context, http_request, job.requests)
        return Response(orjson.dumps(_response(context, job, results)), media_type="application/json")

    return router


async def _prepare(
    context: ApiContext, body: CompletionBody, special_tokens: SpecialTokens, created: int
) -> _Job:
    """Check the request, encode its prompts and build the engine's requests."""
    _check_fields(context, body)
    if not body.add_special_tokens:
        special_tokens = SpecialTokens()
    texts, rows = await encode_prompts(context, body.prompt, special_tokens, param="prompt")
    rows = truncate_prompts(context, rows, body.truncate_prompt_tokens, body.new_tokens)
    if not texts or body.truncate_prompt_tokens is not None:
        texts = [context.tokenizer.decode(row) if body.echo else "" for row in rows]
    check_length(context, rows, body.new_tokens, body.n or 1)
    job = _Job(body, new_id("cmpl"), created, model_name(context), texts, rows)
    params = body.sampling_params(
        context, max_tokens=body.new_tokens, logprobs=body.logprobs, grammar=body.grammar(context)
    )
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    job.requests = [
        EngineRequest(
            request_id=f"{job.completion_id}-{index}",
            prompt_token_ids=tuple(row),
            # each prompt has a seed of its own, or equal prompts would have equal texts
            params=replace(params, seed=None if params.seed is None else (params.seed + index) % 2**63),
            n=job.n,
            priority=body.priority or 0,
            cache_namespace=body.cache_salt or "",
        )
        for index, row in enumerate(rows)
    ]
    return job


def _check_fields(context: ApiContext, body: CompletionBody) -> None:
    body.check_shared(context)
    if body.best_of is not None:
        raise RequestError("best_of", "not supported", hint='"n" returns every sequence')
    if body.suffix is not None:
        raise RequestError("suffix", "not supported", hint="put the whole text into the prompt")
    if (body.logprobs or 0) > context.limits.logprobs:
        wanted = f"at most {context.limits.logprobs}"
        raise RequestError("logprobs", "above the server's limit", found=body.logprobs, wanted=wanted)
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise RequestError("max_tokens", "nothing to return", found=0, hint='"echo": true scores the prompt')
    check_prompt_count(context, body.prompt, "prompt")


def _response(context: ApiContext, job: _Job, results: Sequence[GeneratedResult]) -> dict[str, Any]:
    choices = []
    usage = Usage()
    for index, (request, result) in enumerate(zip(job.requests, results, strict=True)):
        usage.add_prompt(len(request.prompt_token_ids), result.cached_tokens)
        for number, sequence in enumerate(result.sequences):
            usage.completion_tokens += len(sequence.token_ids)
            choice: dict[str, Any] = {
                "index": index * job.n + number,
                "text": (job.texts[index] if job.body.echo else "") + sequence.text,
                "logprobs": None,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
            if job.body.logprobs is not None:
                ids, entries = sequence.token_ids, list(sequence.logprobs)
                if job.body.echo:
                    ids = [*request.prompt_token_ids, *ids]
                    entries = [*result.prompt_logprobs, *entries]  # type: ignore[list-item]
                arrays = CompletionLogprobs(context.tokenizer, job.body.logprobs)
                choice["logprobs"] = arrays.append(ids, entries)
            if job.body.prompt_logprobs is not None:
                top = job.body.prompt_logprobs
                choice["prompt_logprobs"] = prompt_logprobs(context.tokenizer, result.prompt_logprobs, top)
            if job.body.return_token_ids:
                choice["prompt_token_ids"] = request.prompt_token_ids
                choice["token_ids"] = sequence.token_ids
            choices.append(choice)
    return {**_envelope(job), "choices": choices, "usage": usage.as_dict()}


def _envelope(job: _Job) -> dict[str, Any]:
    return {"id": job.completion_id, "object": "text_completion", "created": job.created, "model": job.model}


async def _stream(context: ApiContext, http_request: Request, job: _Job) -> AsyncGenerator[bytes, None]:
    """Yield an event for every output, and one for the usage if asked."""
    writers = [_ChoiceWriter(context, job, index) for index in range(len(job.requests) * job.n)]
    usage = Usage()
    for row in job.rows:
        usage.add_prompt(len(row), 0)
    extra: dict[str, Any] = {"usage": None} if job.body.include_usage else {}
    async with aclosing(stream_requests(context, http_request, job.requests)) as outputs:
        async for index, output in outputs:
            usage.cached_tokens += output.cached_tokens
            usage.completion_tokens += len(output.token_ids)
            if output.prompt_logprobs:
                for number in range(job.n):
                    writers[index * job.n + number].prompt_entries = output.prompt_logprobs
            choice = writers[index * job.n + output.index].write(output)
            if choice is None:
                continue
            if job.body.has_continuous_usage:
                extra = {"usage": usage.as_dict()}
            yield encode_event({**_envelope(job), "choices": [choice], **extra})
    if job.body.include_usage:
        yield encode_event({**_envelope(job), "choices": [], "usage": usage.as_dict()})


class _ChoiceWriter:
    """Turns the outputs of one sequence into the choices of events.

    Attributes:
        prompt_entries: log-probabilities of the prompt, if asked.
    """

    def __init__(self, context: ApiContext, job: _Job, index: int) -> None:
        self.job = job
        self.index = index
        self.tokenizer = context.tokenizer
        self.prompt_entries: Sequence[Any] = ()
        self.is_first = True
        top = job.body.logprobs
        text = job.texts[index // job.n]
        # without `echo` offsets begin at the first new token, as in a response that is no stream
        self.arrays = None if top is None else CompletionLogprobs(context.tokenizer, top)
        self.prefix = text if job.body.echo else ""

    def write(self, output: SequenceOutput) -> dict[str, Any] | None:
        """Return the choice of an event; None if there is nothing to say."""
        prefix, logprobs = "", None
        if self.is_first:
            prefix = self.prefix
        if self.arrays is not None:
            ids, entries = list(output.token_ids), list[Any](output.logprobs)
            if self.is_first and self.job.body.echo:
                ids = [*self.job.rows[self.index // self.job.n], *ids]
                entries = [*self.prompt_entries, *entries]
            logprobs = self.arrays.append(ids, entries) if ids else None
        has_ids = self.job.body.return_token_ids and output.token_ids
        if not (prefix or output.text or logprobs or output.finish_reason or has_ids):
            return None
        choice = {
            "index": self.index,
            "text": prefix + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.is_first and self.job.body.prompt_logprobs is not None:
            top = self.job.body.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, self.prompt_entries, top)
        if self.job.body.return_token_ids:
            choice["prompt_token_ids"] = self.job.rows[self.index // self.job.n] if self.is_first else None
            choice["token_ids"] = output.token_ids
        self.is_first = False
        return choice
