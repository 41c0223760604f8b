"""Refuse requests that could never be served, before anything is allocated for them."""

from __future__ import annotations

from mega_schema.errors import RequestError
from mega_serve.engine.interfaces import ModelRunner
from mega_serve.engine.requests import BeamSearchParams, EngineRequest, SamplingParams
from mega_serve.engine.scheduler import EngineConfig


def check_request(request: EngineRequest, runner: ModelRunner, config: EngineConfig) -> None:
    """Check that a request fits into the model's context, the batch and the KV cache when it runs alone.

    Raises:
        RequestError: it does not.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("prompt", "has no tokens", wanted="at least one")
    if not (min(prompt) >= 0 and max(prompt) < runner.vocab_size):
        found = next(token_id for token_id in prompt if not 0 <= token_id < runner.vocab_size)
        raise RequestError("prompt", "no such token id", found=found, wanted=f"0 to {runner.vocab_size - 1}")
    is_beam_search = isinstance(request.params, BeamSearchParams)
    if request.n < 1 or (is_beam_search and request.n != 1):
        raise RequestError("n", "number of sequences", found=request.n, wanted="1 or more; 1 with beams")
    fewest = 1 if is_beam_search else 0
    if request.params.max_tokens < fewest:
        raise RequestError(
            "max_tokens", "too small", found=request.params.max_tokens, wanted=f"{fewest} or more"
        )
    if (
        isinstance(request.params, SamplingParams)
        and request.params.pooling
        and request.max_total_tokens != len(prompt)
    ):
        raise RequestError("pooling", "an embedding has no tokens", wanted="max_tokens 0 and n 1")
    shortest = len(prompt) + min(1, request.params.max_tokens)
    if shortest > runner.max_seq_len:
        raise RequestError(
            "prompt",
            "longer than the model's context",
            found=f"{len(prompt):,} tokens",
            wanted=f"at most {runner.max_seq_len - min(1, request.params.max_tokens):,}",
        )
    if isinstance(request.params, BeamSearchParams) and not 1 <= request.params.width <= config.max_num_seqs:
        raise RequestError(
            "beam_width",
            "the beams do not fit into one batch",
            found=request.params.width,
            wanted=f"1 to {config.max_num_seqs}",
        )
    pages = _most_pages(request, runner)
    if pages > runner.num_pages:
        raise RequestError(
            "max_tokens",
            "prompt and output do not fit into the KV cache",
            found=f"{pages:,} pages",
            wanted=f"at most {runner.num_pages:,} pages of {runner.page_size} tokens",
        )


def _most_pages(request: EngineRequest, runner: ModelRunner) -> int:
    """Return the pages that must be held at a time: of one sequence, or of all beams."""
    prompt_tokens = len(request.prompt_token_ids)
    total = min(prompt_tokens + request.params.max_tokens, runner.max_seq_len)
    # the last sampled token has no keys and values
    pages = -(-max(prompt_tokens, total - 1) // runner.page_size)
    if not isinstance(request.params, BeamSearchParams):
        return pages
    shared = (prompt_tokens - 1) // runner.page_size
    return shared + request.params.width * (pages - shared)
