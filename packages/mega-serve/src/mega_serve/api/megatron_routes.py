"""PUT and POST /api: Megatron's text generation request and response over the engine.

Megatron runs the prompts of a request as one batch, which shows in the response: every row continues to the
length of the longest prompt + tokens_to_generate, and top_p decays with the steps of the batch, which starts
at the shortest prompt's length. The rows here are requests of their own with these parameters.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.bodies import check_content_type, refuse_body
from mega_serve.api.context import ApiContext
from mega_serve.api.engine_calls import GeneratedResult, GeneratedSequence, new_id, run_requests
from mega_serve.api.megatron import (
    FIELDS,
    BadRequest,
    BeamSearchRequest,
    GenerationRequest,
    SamplingRequest,
    parse_request,
)
from mega_serve.api.megatron_schema import request_body
from mega_serve.api.prompts import context_message, encode_texts, tokens_message
from mega_serve.api.sampling_fields import StructuredOutputs, check_grammar
from mega_serve.api.services import ApiServices
from mega_serve.engine.requests import BeamSearchParams, EngineRequest, GrammarSpec, SamplingParams
from mega_serve.http.errors import HttpError, as_http_error
from mega_serve.process.failure_log import describe_failure

logger = logging.getLogger("mega.serve")

_MIN_TOP_P = math.ulp(0.0)  # a top_p of exactly 0 would keep no word


@dataclass(frozen=True, slots=True)
class _StopTokens:
    """Ids of the tokenizer that the fields of a request refer to; None where it has none."""

    eod: int | None
    newline: int | None
    double_newline: int | None
    colon: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> _StopTokens:
        return cls(
            tokenizer.identity.eod,
            single_token_id(tokenizer, "\n"),
            single_token_id(tokenizer, "\n\n"),
            single_token_id(tokenizer, ":"),
        )


def build_router(context: ApiContext, services: ApiServices | None = None) -> APIRouter:
    """Return the routes of Megatron's API."""
    router = APIRouter(tags=["Megatron"])
    api = _MegatronApi(context, services or ApiServices.from_context(context))

    @router.put("/api", openapi_extra=request_body(), summary="Generate text (Megatron-LM's API)")
    @router.post("/api", openapi_extra=request_body(), summary="Generate text (Megatron-LM's API)")
    async def generate(http_request: Request) -> Response:
        try:
            return await api.answer(http_request)
        except BadRequest as error:
            return _refuse(error, error.detail, error.legacy_status, context.legacy_status)
        except RequestError as error:
            bad = BadRequest(str(error.where), str(error))
            return _refuse(bad, bad.detail, bad.legacy_status, context.legacy_status)
        except (HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            request_id = getattr(getattr(http_request.state, "account", None), "request_id", "")
            http_error = as_http_error(error, request_id)
            if http_error.code == "internal_error":  # a dead engine has said why already
                text = describe_failure(error, with_messages=False)
                logger.error("%s /api failed: %s", http_request.method, text)
            body = {"message": http_error.message, **http_error.body}
            return JSONResponse(body, http_error.status, http_error.headers)

    @router.get("/api", include_in_schema=False)
    async def refuse_get() -> Response:
        raise HttpError(404, "/api accepts PUT and POST only")

    # Starlette would name the methods of the first of two routes only
    @router.api_route(
        "/api", methods=["DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"], include_in_schema=False
    )
    async def refuse_method() -> Response:
        raise HttpError(405, "/api accepts PUT and POST only", headers={"Allow": "POST, PUT"})

    return router


def _refuse(error: BadRequest, detail: str, legacy_status: int, legacy: bool) -> Response:
    field = error.param.partition(".")[0]
    logger.info("/api refused: %s", field if field in FIELDS else "an unknown field")
    if legacy:
        return JSONResponse(error.message, legacy_status)
    openai = HttpError(400, detail, param=error.param, code=error.code)
    return JSONResponse({"message": error.message, **openai.body}, 400)


class _MegatronApi:
    """Maps requests to the engine's and its results to responses."""

    def __init__(self, context: ApiContext, services: ApiServices) -> None:
        self.context = context
        self.services = services
        self.tokenizer = context.tokenizer
        self.stop_tokens = _StopTokens.from_tokenizer(context.tokenizer)

    async def answer(self, http_request: Request) -> Response:
        """Answer one HTTP request.

        Raises:
            BadRequest: the body fails a check.
            HttpError, HTTPException: the content type, or what the engine reports.
        """
        context = self.context
        check_content_type(http_request)
        request = parse_request(
            _load_json(await http_request.body()),
            legacy=context.legacy_status,
            lenient=context.lenient,
            max_beam_width=context.limits.beam_width,
        )
        if context.log_prompts and not request.no_log:
            logger.info("prompts %r", request.prompts)
        prompts = await self._encode(request)
        if isinstance(request, BeamSearchRequest):
            body = await self._beam_search(request, prompts[0], http_request)
        else:
            body = await self._sample(request, prompts, http_request)
        return Response(orjson.dumps(body), media_type="application/json")

    async def _sample(
        self, request: SamplingRequest, prompts: Sequence[list[int]], http_request: Request
    ) -> dict[str, object]:
        self._check_length(prompts, request.tokens_to_generate, rows=len(prompts))
        grammar = self._grammar(request)
        await self.services.grammars.check(grammar)
        engine_requests = self._sampling_requests(request, prompts, grammar)
        results = await run_requests(self.context, http_request, engine_requests)
        rows = [
            [*prompt, *result.sequences[0].token_ids] for prompt, result in zip(prompts, results, strict=True)
        ]
        texts = zip(request.prompts, prompts, rows, strict=True)
        return {
            "text": [self._response_text(*row) for row in texts],
            "segments": [self.tokenizer.pieces(row) for row in rows],
            "logprobs": [_row_logprobs(result) for result in results] if request.logprobs else None,
        }

    def _sampling_requests(
        self, request: SamplingRequest, prompts: Sequence[Sequence[int]], grammar: GrammarSpec | None
    ) -> list[EngineRequest]:
        lengths = [len(prompt) for prompt in prompts]
        total = max(lengths) + request.tokens_to_generate
        is_scoring = request.tokens_to_generate == 0
        logprobs = 0 if request.logprobs else None
        stop_ids, repeated_id = self._stop_criteria(request)
        has_eol_stop = request.stop_on_eol or request.stop_on_double_eol
        group_id = new_id("api")
        return [
            EngineRequest(
                request_id=f"{group_id}-{row}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(
                    max_tokens=0 if is_scoring else total - len(prompt),
                    temperature=request.temperature,
                    top_k=request.top_k,
                    top_p=_decayed_top_p(request, len(prompt) - min(lengths)),
                    top_p_decay=request.top_p_decay,
                    top_p_bound=request.top_p_bound,
                    stop_token_ids=stop_ids,
                    stop_repeated_id=repeated_id,
                    banned_bigram=self._banned_bigram(request),
                    # as in Megatron: a stop at the end of a line replaces the one at the end of a document
                    ignore_eos=has_eol_stop,
                    seed=None if request.random_seed is None else (request.random_seed + row) % 2**63,
                    logprobs=logprobs,
                    prompt_logprobs=logprobs,
                    grammar=grammar,
                ),
                priority=request.priority,
                cache_namespace=request.cache_salt,
            )
            for row, prompt in enumerate(prompts)
        ]

    async def _beam_search(
        self, request: BeamSearchRequest, prompt: list[int], http_request: Request
    ) -> dict[str, object]:
        self._check_length([prompt], request.tokens_to_generate, rows=request.beam_width)
        if request.tokens_to_generate == 0:
            raise BadRequest("tokens_to_generate", "context length + tokens_to_generate too large")
        stop = self.stop_tokens.eod if request.stop_token is None else request.stop_token
        is_token = stop is not None and 0 <= stop < self.context.client.model.vocab_size
        engine_request = EngineRequest(
            request_id=new_id("api"),
            prompt_token_ids=tuple(prompt),
            params=BeamSearchParams(
                max_tokens=request.tokens_to_generate,
                width=request.beam_width,
                length_penalty=request.length_penalty,
                stop_token_id=stop if is_token else None,
                banned_bigram=self._banned_bigram(request),
            ),
            priority=request.priority,
            cache_namespace=request.cache_salt,
        )
        [result] = await run_requests(self.context, http_request, [engine_request])
        beams = sorted(result.sequences, key=_beam_score, reverse=True)
        # a vocabulary smaller than the beams leaves some without a hypothesis
        beams = [beam for beam in beams if beam.score is not None]
        rows = [[*prompt, *beam.token_ids] for beam in beams]
        return {
            "text": [self._response_text(request.prompts[0], prompt, row) for row in rows],
            "segments": [self.tokenizer.pieces(row) for row in rows],
            "scores": [beam.score for beam in beams],
        }

    async def _encode(self, request: GenerationRequest) -> list[list[int]]:
        """Encode the prompts; as in GPT-2, the end-of-document token also begins a document."""
        eod = self.stop_tokens.eod
        if request.add_bos and eod is None:
            message = "add_BOS needs a tokenizer with an end-of-document token, and this one has none"
            raise BadRequest("add_BOS", message, code="unsupported")
        rows = await encode_texts(self.context, request.prompts, param="prompts")
        return [[eod, *row] for row in rows] if request.add_bos and eod is not None else rows

    def _check_length(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, rows: int) -> None:
        if not all(prompts):
            raise BadRequest("prompts", "a prompt has no tokens")
        longest = max(map(len, prompts))
        context = self.context.client.model.max_seq_len
        if longest + new_tokens > context:
            raise BadRequest(
                "tokens_to_generate",
                "Length of prompt + tokens_to_generate longer than allowed",
                code="context_length_exceeded",
                detail=context_message(context, longest, min(new_tokens, 10**18)),
            )
        limit = self.context.limits.request_tokens
        total = rows * (longest + new_tokens)
        if total > limit:
            raise BadRequest(
                "tokens_to_generate",
                f"Too many tokens.  {total} is greater than {limit}",
                code="context_length_exceeded",
                detail=tokens_message(limit, total),
            )

    def _stop_criteria(self, request: SamplingRequest) -> tuple[tuple[int, ...], int | None]:
        """Return the ids that end a row, and the id that ends it when it comes twice."""
        tokens = self.stop_tokens
        field = None
        if request.stop_on_double_eol:
            field = "stop_on_double_eol"
        elif request.stop_on_eol:
            field = "stop_on_eol"
        if field is None:
            return (), None  # the engine stops at the end of a document by itself
        if tokens.newline is None:
            message = f"{field} needs a tokenizer with a token for a line break, and this one has none"
            raise BadRequest(field, message, code="unsupported")
        double = () if tokens.double_newline is None else (tokens.double_newline,)
        return (double, tokens.newline) if request.stop_on_double_eol else ((*double, tokens.newline), None)

    def _banned_bigram(self, request: GenerationRequest) -> tuple[int, int] | None:
        """Return the pair (colon, newline) if the request excludes it and the tokenizer has both."""
        tokens = self.stop_tokens
        if not request.prevent_newline_after_colon or tokens.colon is None or tokens.newline is None:
            return None
        return tokens.colon, tokens.newline

    def _grammar(self, request: SamplingRequest) -> GrammarSpec | None:
        if request.structured_outputs is None:
            return None
        try:
            specs = StructuredOutputs.model_validate(dict(request.structured_outputs)).specs()
        except ValidationError as error:
            refusal = refuse_body(error, StructuredOutputs)
            param = f"structured_outputs.{refusal.param}"
            message = f"structured_outputs.{refusal.message}"
            raise BadRequest(param, message) from None
        if len(specs) != 1:
            raise BadRequest("structured_outputs", "structured_outputs must have one constraint")
        return check_grammar(self.context, specs[0])

    def _response_text(self, prompt: str, prompt_ids: Sequence[int], row: Sequence[int]) -> str:
        """Return the prompt exactly as it was sent, followed by the decoded continuation.

        Clients remove the first len(prompt) characters. The continuation is cut from the decoded row, because
        some tokenizers drop the space before the first word of a text.
        """
        row_text = self.tokenizer.decode(row)
        prompt_text = self.tokenizer.decode(prompt_ids)
        if row_text.startswith(prompt_text):
            return prompt + row_text[len(prompt_text) :]
        return prompt + self.tokenizer.decode(row[len(prompt_ids) :])


def single_token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of `text` inside a line, or None if it takes several tokens."""
    for prefix in ("a", ".", ""):
        try:
            prefix_ids = tokenizer.encode(prefix)
            ids = tokenizer.encode(prefix + text)
        except RequestError:
            return None  # this tokenizer encodes numbers only
        # one more id, which is not the unknown token
        is_one_more = ids[:-1] == prefix_ids and len(ids) == len(prefix_ids) + 1
        if is_one_more and tokenizer.decode(ids) == prefix + text:
            return ids[-1]
    return None


def _decayed_top_p(request: SamplingRequest, steps: int) -> float:
    """Return top_p after some steps of the batch; 1 keeps all words where Megatron says 0."""
    if request.top_p == 0.0:
        return 1.0
    top_p = request.top_p
    if request.top_p_decay > 0.0:
        for _ in range(steps):
            top_p = max(top_p * request.top_p_decay, request.top_p_bound, _MIN_TOP_P)
    return top_p


def _row_logprobs(result: GeneratedResult) -> list[float]:
    """Return ln P of the prompt's tokens from the second, and of the generated ones."""
    tokens = [*result.prompt_logprobs[1:], *result.sequences[0].logprobs]
    return [token.logprob for token in tokens if token is not None]


def _beam_score(beam: GeneratedSequence) -> float:
    return -math.inf if beam.score is None else beam.score


def _load_json(content: bytes) -> Any:
    """Decode a body.

    Raises:
        HttpError: 400, it is not JSON.
    """
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:
        reason = "it cannot be decoded"
    raise HttpError(400, f"the body is not JSON: {reason}", code="invalid_json")
