"""Engine clients for tests of the HTTP APIs: one runs a small model naively, one follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.decoder import Decoder
from mega_model.generate import beam_search
from mega_model.sampling import sample_token
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.interfaces import ModelInfo
from mega_serve.engine.requests import (
    BeamSearchParams,
    EngineRequest,
    EngineStats,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)


@dataclass
class RecordingClient:
    """The part that both clients share: what is served, and the requests that came.

    Attributes:
        closed: ids of requests whose iterator was closed before its end.
    """

    model: ModelInfo
    requests: list[EngineRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    is_alive: bool = True

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        self.requests.append(request)
        is_complete = False
        try:
            async for output in self.outputs(request):
                yield output
            is_complete = True
        finally:
            if not is_complete:
                self.closed.append(request.request_id)

    def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        raise NotImplementedError


class NaiveEngineClient(RecordingClient):
    """Runs one forward pass over the whole sequence per token, in float32: slow and simple."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, name: str = "tiny") -> None:
        identity = tokenizer.identity
        super().__init__(
            ModelInfo(
                name=name,
                iteration=7,
                created=1_700_000_000,
                max_seq_len=decoder.spec.max_seq_len,
                vocab_size=min(identity.vocab_size, decoder.spec.vocab),
                eod=identity.eod,
                bos=identity.bos,
                hidden_size=decoder.spec.hidden,
            )
        )
        self.decoder = decoder
        self.tokenizer = tokenizer

    async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        if isinstance(request.params, BeamSearchParams):
            for output in self._beams(request, request.params):
                yield output
            return
        for index in range(request.n):
            async for output in self._sequence(request, request.params, index):
                yield output

    def _beams(self, request: EngineRequest, params: BeamSearchParams) -> list[SequenceOutput]:
        beams = beam_search(
            self.decoder,
            request.prompt_token_ids,
            new_tokens=params.max_tokens,
            width=params.width,
            stop=params.stop_token_id,
            length_penalty=params.length_penalty,
            banned_bigram=params.banned_bigram,
            vocab_limit=self.model.vocab_size,
        )
        return [
            SequenceOutput(
                request_id=request.request_id,
                index=index,
                token_ids=tuple(beam.row[len(request.prompt_token_ids) :]),
                finish_reason="length",
                score=beam.score,
            )
            for index, beam in enumerate(beams)
        ]

    async def _sequence(
        self, request: EngineRequest, params: SamplingParams, index: int
    ) -> AsyncGenerator[SequenceOutput, None]:
        row = list(request.prompt_token_ids)
        if params.pooling is not None:
            x_TD = self.hidden_states(row)
            x_D = x_TD[-1] if params.pooling == "last" else x_TD.mean(0)
            yield SequenceOutput(
                request_id=request.request_id, finish_reason="stop", embedding=tuple(x_D.tolist())
            )
            return
        scores = self._prompt_scores(row, params) if index == 0 else ()
        if params.max_tokens == 0:
            yield SequenceOutput(
                request_id=request.request_id, prompt_logprobs=scores, finish_reason="length"
            )
            return
        generator = (
            torch.Generator().manual_seed((params.seed or 0) + index) if params.seed is not None else None
        )
        top_p = params.top_p
        text = ""
        for count in range(1, params.max_tokens + 1):
            await asyncio.sleep(0)
            logit_V = self.logits(row)[-1]
            token = self._sample(logit_V, row, params, top_p, generator)
            if params.top_p_decay > 0.0:
                top_p = max(top_p * params.top_p_decay, params.top_p_bound, 5e-324)
            stop_reason = self._stop_reason(row, token, params)
            row.append(token)
            new_text = self._text(request, row[:-1] if isinstance(stop_reason, int) else row)
            cut = next((s for s in params.stop if s in new_text), None)
            if cut is not None:
                new_text, stop_reason = new_text[: new_text.index(cut)], cut
            is_last = count == params.max_tokens
            yield SequenceOutput(
                request_id=request.request_id,
                index=index,
                token_ids=(token,),
                text=new_text[len(text) :],
                logprobs=() if params.logprobs is None else (entry(logit_V, token, params.logprobs),),
                prompt_logprobs=scores if count == 1 else (),
                finish_reason="stop" if stop_reason is not None else "length" if is_last else None,
                stop_reason=stop_reason,
            )
            text = new_text
            if stop_reason is not None:
                return

    @torch.inference_mode()
    def logits(self, row: Sequence[int]) -> Tensor:
        """Return the logits, (T, V), of every token of the row."""
        return self.decoder.logits(self.hidden_states(row))[:, : self.decoder.spec.vocab].float()

    @torch.inference_mode()
    def hidden_states(self, row: Sequence[int]) -> Tensor:
        """Return the hidden states, (T, D), of every token of the row."""
        attend = PackedAttention(rows=1, length=len(row))
        return self.decoder.hidden_states(torch.tensor(row), torch.arange(len(row)), attend)

    def _sample(
        self,
        logit_V: Tensor,
        row: list[int],
        params: SamplingParams,
        top_p: float,
        generator: torch.Generator | None,
    ) -> int:
        logit_1V = logit_V[None, : self.model.vocab_size].clone()
        for token, bias in params.logit_bias:
            logit_1V[0, token] += bias
        if params.banned_bigram is not None and row[-1] == params.banned_bigram[0]:
            logit_1V[0, params.banned_bigram[1]] = -1e10
        if params.is_greedy:
            return int(logit_1V.argmax())
        sampled = sample_token(
            logit_1V,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=top_p if top_p < 1.0 else 0.0,
            generator=generator,
        )
        return int(sampled)

    def _stop_reason(self, row: list[int], token: int, params: SamplingParams) -> int | str | None:
        is_eod = token == self.model.eod and not params.ignore_eos
        is_repeated = token == params.stop_repeated_id and row[-1] == token
        return token if is_eod or is_repeated or token in params.stop_token_ids else None

    def _text(self, request: EngineRequest, row: list[int]) -> str:
        return self.tokenizer.decode(row[len(request.prompt_token_ids) :])

    def _prompt_scores(self, row: list[int], params: SamplingParams) -> tuple[TokenLogprob | None, ...]:
        if params.prompt_logprobs is None:
            return ()
        logit_TV = self.logits(row)
        top = params.prompt_logprobs
        return (None, *(entry(logit_TV[i], row[i + 1], top) for i in range(len(row) - 1)))


def entry(logit_V: Tensor, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of a token among the `top` most probable ones."""
    logprob_V = logit_V.log_softmax(-1)
    values, ids = logprob_V.topk(top)
    rank = int((logprob_V > logprob_V[token]).sum()) + 1
    pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprob_V[token]), rank, pairs)


SCRIPTED_EMBEDDING = (3.0, -4.0, 12.0)


class ScriptedEngineClient(RecordingClient):
    """Answers every sequence with a given text, one character a step.

    Args:
        text: of every answer, or a function of the request.
        before_step: awaited before every output; may raise.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str | Callable[[EngineRequest], str] = "Hi there.",
        before_step: Callable[[int], Any] | None = None,
        max_seq_len: int = 4096,
    ) -> None:
        identity = tokenizer.identity
        super().__init__(
            ModelInfo(
                name="script",
                iteration=1,
                created=1_700_000_000,
                max_seq_len=max_seq_len,
                vocab_size=identity.vocab_size,
                eod=identity.eod,
                bos=identity.bos,
                hidden_size=len(SCRIPTED_EMBEDDING),
            )
        )
        self.tokenizer = tokenizer
        self.text = text
        self.before_step = before_step

    async def outputs(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        text = self.text if isinstance(self.text, str) else self.text(request)
        params = request.params
        logprobs = params.logprobs if isinstance(params, SamplingParams) else None
        if isinstance(params, SamplingParams) and params.pooling is not None:
            yield SequenceOutput(
                request_id=request.request_id, finish_reason="stop", embedding=SCRIPTED_EMBEDDING
            )
            return
        for step, character in enumerate(text):
            if self.before_step is not None:
                await self.before_step(step)
            ids = tuple(self.tokenizer.encode(character))
            is_last = step == len(text) - 1
            for index in range(request.rows):
                yield SequenceOutput(
                    request_id=request.request_id,
                    index=index,
                    token_ids=ids,
                    text=character,
                    logprobs=() if logprobs is None else tuple(scripted_entry(i, logprobs) for i in ids),
                    finish_reason="stop" if is_last else None,
                    cached_tokens=2 if step == 0 and index == 0 else 0,
                    score=-float(index) if isinstance(params, BeamSearchParams) else None,
                )


def scripted_entry(token: int, top: int) -> TokenLogprob:
    """Return a log-probability of -0.5 among `top` words."""
    return TokenLogprob(token, -0.5, 1, tuple((token + i, -0.5 - i) for i in range(top)))
