"""Generate text from prompts: Megatron's batch scheme, scoring and beam search, with a KV cache.

Functions take and return token ids; text, files and time limits are the caller's. Shape suffixes: B rows of
the batch (prompts, or beams), S tokens of a row, T = B·S of them end to end, D width, V words of the
vocabulary without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_model.attention_backends import KVCacheAttention
from mega_model.decoder import Decoder
from mega_model.sampling import sample_token
from mega_schema.errors import RequestError

_CHUNK_LOGITS = 1 << 22  # values computed at a time: 16 MiB in float32, for any prompt length and vocabulary
_BANNED_LOGIT = -1e10  # the logit Megatron gives to a word that is not allowed
_MIN_TOP_P = math.ulp(0.0)  # a top_p of exactly 0 would disable the filter


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """The conditions that end a row: a token of `ids`, or the token `repeated_id` twice in a row.

    The row keeps that token.
    """

    ids: frozenset[int] = frozenset()
    repeated_id: int | None = None

    def is_met(self, new_B: Tensor, before_B: Tensor) -> Tensor:
        """Return, (B,) bool, whether a row whose last token was `before_B` ends with `new_B`."""
        met_B = torch.zeros_like(new_B, dtype=torch.bool)
        for token in self.ids:
            met_B |= new_B == token
        if self.repeated_id is not None:
            met_B |= (new_B == self.repeated_id) & (before_B == self.repeated_id)
        return met_B


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """The result of a batch of prompts.

    Attributes:
        rows: prompt and continuation of every prompt, in order.
        logprobs: ln P(token i+1 | tokens up to i) of every row, one fewer than its tokens; None if not
            requested.
    """

    rows: list[list[int]]
    logprobs: list[list[float]] | None


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished hypothesis: prompt, continuation and stop token, if any; and its score."""

    row: list[int]
    score: float


def check_length(model: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Return the number of tokens of the longest finished row.

    Raises:
        RequestError: a prompt has no tokens, or the longest row would exceed the model's context.
    """
    if not all(prompts):
        raise RequestError("prompts", "a prompt has no tokens", wanted="at least one")
    longest = max(len(prompt) for prompt in prompts)
    if longest + new_tokens > model.spec.max_seq_len:
        raise RequestError(
            "new_tokens",
            "prompt and new tokens exceed the model's context",
            found=f"{longest:,} + {new_tokens}",
            wanted=f"at most {model.spec.max_seq_len:,}",
        )
    return longest + new_tokens


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    top_p_decay: float = 0.0,
    top_p_bound: float = 0.0,
    stop: StopCriteria = StopCriteria(),  # immutable
    banned_bigram: tuple[int, int] | None = None,
    vocab_limit: int | None = None,
    logprobs: bool = False,
    generator: torch.Generator | None = None,
    before_step: Callable[[int], None] | None = None,
) -> GenerateOutput:
    """Continue every prompt until `stop`, or until it is the longest prompt's length + `new_tokens`.

    The batch starts at the shortest prompt's length and grows by one token a step; a longer prompt keeps its
    own tokens until they are used up. Generation ends early once every row has stopped.

    Args:
        temperature, top_k, top_p: see `sampling.sample_token`.
        top_p_decay, top_p_bound: after every step of the batch top_p becomes max(top_p · decay, bound); a
            decay of 0 keeps it constant.
        banned_bigram: (a, b): after the token a, b is never sampled.
        vocab_limit: sample only ids below this (a tokenizer may have fewer than the model); log-probabilities
            are still over all ids.
        logprobs: also return log-probabilities, from the model's logits before temperature, filters and
            `banned_bigram`.
        generator: random generator on the model's device.
        before_step: called with the batch's length before each forward pass; an exception from it ends
            generation.

    Raises:
        RequestError: see `check_length`.
    """
    assert new_tokens > 0, "score() is for no new tokens"
    total = check_length(model, prompts, new_tokens)
    token_BS, length_B = _pad_prompts(model, prompts, total)
    rows = len(prompts)
    cache = _new_cache(model, rows, total - 1)
    logprob_BS = torch.zeros(rows, total - 1, device=token_BS.device) if logprobs else None
    end_B = torch.full_like(length_B, total)
    finished_B = torch.zeros_like(length_B, dtype=torch.bool)
    cached = 0
    for position in range(int(length_B.min()), total):
        if before_step is not None:
            before_step(position)
        x_BSD = _hidden_states(model, token_BS[:, cached:position], cache)
        logit_BV = _logits(model, x_BSD[:, -1])
        masked_BV = _mask_banned(logit_BV[:, :vocab_limit], token_BS[:, position - 1], banned_bigram)
        new_B = sample_token(
            masked_BV, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
        if top_p > 0.0 and top_p_decay > 0.0:
            top_p = max(top_p * top_p_decay, top_p_bound, _MIN_TOP_P)
        started_B = length_B <= position
        token_BS[:, position] = torch.where(started_B, new_B, token_BS[:, position])
        if logprob_BS is not None:
            step_tokens_BS = token_BS[:, cached + 1 : position + 1]
            logprob_BS[:, cached:position] = _step_logprobs(model, x_BSD, logit_BV, step_tokens_BS)
        finishing_B = stop.is_met(new_B, token_BS[:, position - 1]) & started_B & ~finished_B
        end_B = torch.where(finishing_B, position + 1, end_B)
        finished_B |= finishing_B
        if bool(finished_B.all()):
            break
        cached = position
    return _trim_rows(token_BS, end_B, logprob_BS)


def _step_logprobs(model: Decoder, x_BSD: Tensor, logit_BV: Tensor, token_BS: Tensor) -> Tensor:
    """Return, (B, S), log-probabilities of a step's tokens, the last of which has the logits `logit_BV`."""
    last_B1 = logit_BV.log_softmax(-1).gather(1, token_BS[:, -1:])
    return torch.cat([_logprobs(model, x_BSD[:, :-1], token_BS[:, :-1]), last_B1], dim=1)


@torch.inference_mode()
def score(model: Decoder, prompts: Sequence[Sequence[int]]) -> GenerateOutput:
    """Compute log-probabilities of the prompts' own tokens, in one forward pass.

    Raises:
        RequestError: see `check_length`.
    """
    total = check_length(model, prompts, 0)
    token_BS, length_B = _pad_prompts(model, prompts, total)
    x_BSD = _hidden_states(model, token_BS, _new_cache(model, len(prompts), total))
    return _trim_rows(token_BS, length_B, _logprobs(model, x_BSD[:, :-1], token_BS[:, 1:]))


@torch.inference_mode()
def beam_search(
    model: Decoder,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    width: int,
    stop: int | None,
    length_penalty: float = 1.0,
    banned_bigram: tuple[int, int] | None = None,
    vocab_limit: int | None = None,
    before_step: Callable[[int], None] | None = None,
) -> list[BeamHypothesis]:
    """Return the `width` best continuations, best first; fewer if the vocabulary is smaller.

    A hypothesis' score is Σ ln P over its new tokens, divided by their number to the power `length_penalty`;
    a stop token counts. Every step takes the 2·width best continuations of the open beams: a stop token among
    the first `width` finishes its beam, any other token continues one. The search ends when `width` beams are
    finished and no open beam scores higher than the worst of them. Beams still open at the length limit are
    finished as they are.

    Args:
        stop: the id that finishes a hypothesis; None or an id outside the vocabulary finishes none.
        banned_bigram, vocab_limit, before_step: see `generate`.

    Raises:
        RequestError: see `check_length`.
    """
    assert new_tokens > 0, "beam search needs at least one new token"
    total = check_length(model, [prompt], new_tokens)
    token_BS = _pad_prompts(model, [prompt], total)[0].repeat(width, 1)
    cache = _new_cache(model, 1, total - 1)
    # all beams start as the same prompt: only the first may be continued, or all would stay identical
    sum_B = torch.full((width,), float("-inf"), device=token_BS.device)
    sum_B[0] = 0.0
    finished = _FinishedBeams(width, length_penalty)
    cached = 0
    for position in range(len(prompt), total):
        if before_step is not None:
            before_step(position)
        new = position + 1 - len(prompt)
        x_BSD = _hidden_states(model, token_BS[: cache.rows, cached:position], cache)
        if cache.rows < width:
            x_BSD = x_BSD.expand(width, -1, -1)
            cache.select(torch.zeros(width, dtype=torch.long, device=token_BS.device))
        logit_BV = _mask_banned(_logits(model, x_BSD[:, -1]), token_BS[:, position - 1], banned_bigram)
        sum_BV = sum_B[:, None] + logit_BV.log_softmax(-1)[:, :vocab_limit]
        open_beams = []
        for rank, (logprob, beam, token) in enumerate(_top_continuations(sum_BV, 2 * width)):
            if token != stop:
                open_beams.append((logprob, beam, token))
            elif rank < width:
                finished.add([*token_BS[beam, :position].tolist(), token], logprob, new)
            if len(open_beams) == width:
                break
        if finished.is_done(float(sum_BV.max()), new):
            return finished.sorted_beams()
        sums, beams, tokens = zip(*open_beams, strict=True)
        parent_B = torch.tensor(beams, device=token_BS.device)
        token_BS, sum_B = token_BS[parent_B], torch.tensor(sums, device=token_BS.device)
        token_BS[:, position] = torch.tensor(tokens, device=token_BS.device)
        cache.select(parent_B)
        cached = position
    for row, logprob in zip(token_BS.tolist(), sum_B.tolist(), strict=True):
        finished.add(row, logprob, new_tokens)
    return finished.sorted_beams()


class _FinishedBeams:
    """The `width` best finished hypotheses."""

    def __init__(self, width: int, length_penalty: float) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.beams: list[BeamHypothesis] = []

    def add(self, row: list[int], logprob: float, new: int) -> None:
        """Keep a hypothesis of `new` new tokens if it is among the best; of two equal ones, the earlier."""
        if logprob == float("-inf"):
            return  # an unused slot: the vocabulary has fewer than `width` words
        self.beams.append(BeamHypothesis(row, self._score(logprob, new)))
        self.beams = self.sorted_beams()[: self.width]

    def is_done(self, best_logprob: float, new: int) -> bool:
        """Whether `width` beams are finished and no open beam scores higher than the worst of them."""
        return len(self.beams) == self.width and self.beams[-1].score >= self._score(best_logprob, new)

    def sorted_beams(self) -> list[BeamHypothesis]:
        return sorted(self.beams, key=lambda beam: beam.score, reverse=True)

    def _score(self, logprob: float, new: int) -> float:
        return float(logprob / new**self.length_penalty)


def _pad_prompts(model: Decoder, prompts: Sequence[Sequence[int]], total: int) -> tuple[Tensor, Tensor]:
    """Return (B, total) ids, padded with 0, and (B,) lengths; on the model's device."""
    device = next(model.parameters()).device
    token_BS = torch.zeros(len(prompts), total, dtype=torch.long)
    for row_S, prompt in zip(token_BS, prompts, strict=True):
        row_S[: len(prompt)] = torch.tensor(prompt)
    length_B = torch.tensor([len(prompt) for prompt in prompts])
    return token_BS.to(device), length_B.to(device)


def _new_cache(model: Decoder, rows: int, capacity: int) -> KVCacheAttention:
    weight = next(model.parameters())
    return KVCacheAttention(
        model.spec, rows=rows, capacity=capacity, dtype=weight.dtype, device=weight.device
    )


def _hidden_states(model: Decoder, token_BS: Tensor, cache: KVCacheAttention) -> Tensor:
    """Return (B, S, D) for the tokens that follow the cached ones."""
    rows, new = token_BS.shape
    position_S = torch.arange(cache.length, cache.length + new, device=token_BS.device)
    return model.hidden_states(token_BS.flatten(), position_S.repeat(rows), cache).unflatten(0, (rows, new))


def _logits(model: Decoder, x_TD: Tensor) -> Tensor:
    """Compute the logits, (T, V) in float32, without the padding of the vocabulary."""
    return model.logits(x_TD)[:, : model.spec.vocab].float()


def _logprobs(model: Decoder, x_BSD: Tensor, target_BS: Tensor) -> Tensor:
    """Return ln P(target), (B, S), computing the logits of a few tokens at a time."""
    x_TD = x_BSD.flatten(0, 1)
    target_T1 = target_BS.flatten()[:, None]
    chunk = max(1, _CHUNK_LOGITS // model.spec.vocab)
    parts = [
        _logits(model, x_TD[i : i + chunk]).log_softmax(-1).gather(1, target_T1[i : i + chunk])
        for i in range(0, len(x_TD), chunk)
    ]
    return torch.cat(parts).view(target_BS.shape) if parts else target_BS.float()


def _mask_banned(logit_BV: Tensor, before_B: Tensor, banned_bigram: tuple[int, int] | None) -> Tensor:
    if banned_bigram is None:
        return logit_BV
    before, banned = banned_bigram
    masked_BV = logit_BV.clone()
    masked_BV[before_B == before, banned] = _BANNED_LOGIT
    return masked_BV


def _top_continuations(sum_BV: Tensor, count: int) -> list[tuple[float, int, int]]:
    """Return the `count` largest sums over all beams as (sum, beam, token), largest first."""
    top = sum_BV.flatten().topk(min(count, sum_BV.numel()))
    width = sum_BV.shape[1]
    pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return [(value, index // width, index % width) for value, index in pairs]


def _trim_rows(token_BS: Tensor, end_B: Tensor, logprob_BS: Tensor | None) -> GenerateOutput:
    ends = end_B.tolist()
    rows = [row[:end] for row, end in zip(token_BS.tolist(), ends, strict=True)]
    if logprob_BS is None:
        return GenerateOutput(rows, None)
    return GenerateOutput(rows, [row[: end - 1] for row, end in zip(logprob_BS.tolist(), ends, strict=True)])
