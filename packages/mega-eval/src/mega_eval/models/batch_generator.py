"""Continue prompts greedily in batches, whose rows leave as they finish.

Legend: B rows; R different ends of prompts; D width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch

from mega_eval.batch_size import free_memory
from mega_eval.forward_plan import plan_passes
from mega_eval.generation_plan import plan_batches
from mega_eval.models.greedy_continuation import GreedyContinuation, answer_batches, cut_prompt
from mega_eval.models.interface import GenerationRequest
from mega_eval.scorer import ModelScorer
from mega_eval.windows import Window, as_tokens
from mega_model.decoder import Decoder
from mega_model.row_cache import PromptAttention, RowCache, cache_token_bytes
from mega_model.token_tree_attention import PrefixKeyValues
from mega_schema.tokenizer.tokenizer import Tokenizer

MAX_ROWS = 256  # answers are kept after each batch: an interruption loses no more than these
_CACHE_SHARE = 0.25  # of the free memory; leaving rows copies the cache


class BatchGenerator:
    """Continues prompts by a decoder, whole or split over ranks: every rank of a copy makes the same calls.

    Args:
        decoder: the whole model, or this rank's stage and slice.
        scorer: of the same decoder; it runs it and chooses tokens.
        batch_size: prompts of a batch at most; None: as many as fit.
        max_cached: tokens of the KV cache at most; None: chosen by the memory that is free before a call.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        scorer: ModelScorer,
        *,
        batch_size: int | None = None,
        max_cached: int | None = None,
    ) -> None:
        self._decoder = decoder.eval()
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._batch_size = batch_size
        self._max_cached = max_cached
        # a tokenizer may have fewer tokens than the model
        self._vocab_size = min(decoder.spec.vocab, tokenizer.identity.vocab_size)

    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield the continuations of a batch at a time, as `RequestModel.generate_batches` does.

        Raises:
            RequestError: a prompt has no tokens.
        """
        for batch in self.continue_batches(requests, answered):
            yield [(number, continuation.text) for number, continuation in batch]

    def continue_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, GreedyContinuation]]]:
        """Return the finished continuations of a batch at a time, as `answer_batches` does.

        Raises:
            RequestError: a prompt has no tokens.
        """
        chosen = [cut_prompt(request, self._scorer.context_length) for request in requests]
        batches = plan_batches(
            [request.prompt for request in chosen],
            [request.max_tokens for request in chosen],
            max_tokens=self._scorer.choose_max_tokens(),
            max_cached=self._max_cached or choose_max_cached(self._decoder),
            max_rows=self._batch_size or MAX_ROWS,
        )
        return answer_batches(batches, chosen, answered, self._continue_within_memory)

    @torch.inference_mode()
    def _continue_within_memory(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GreedyContinuation] | None:
        tokens = sum(len(request.prompt) for request in requests)
        return self._scorer.call_within_memory(partial(self._continue, requests), tokens)

    def _continue(self, requests: Sequence[GenerationRequest]) -> list[GreedyContinuation]:
        """Return the continuations of a batch."""
        device = self._scorer.device
        continuations = [GreedyContinuation(request, self._tokenizer) for request in requests]
        cache = RowCache(
            self._decoder.stage.layers,
            [len(request.prompt) for request in requests],
            new_tokens=max(request.max_tokens for request in requests) - 1,
        )
        tokens = self._read_prompts([request.prompt for request in requests], cache)
        rows = continuations
        while True:
            for row, token in zip(rows, tokens, strict=True):
                row.add(token)
            left = [number for number, row in enumerate(rows) if not row.is_finished]
            if not left:
                return continuations
            if len(left) < len(rows):
                cache.select(left)
                rows = [rows[number] for number in left]
            token_B = torch.tensor([row.ids[-1] for row in rows], device=device)
            position_B = torch.tensor(cache.positions, device=device)
            x_BD = self._scorer.run_decoder(token_B, position_B, cache)
            tokens = self._scorer.choose_tokens(x_BD, len(rows), self._vocab_size)

    def _read_prompts(self, prompts: Sequence[Sequence[int]], cache: RowCache) -> list[int]:
        """Run one forward pass over the prompts, fill the cache, and return the token after each."""
        windows = [Window(as_tokens([*prompt, 0]), 1) for prompt in prompts]
        (forward_pass,) = plan_passes(windows, max_tokens=sum(map(len, prompts)))
        row_of = dict(zip(forward_pass.window_K.tolist(), forward_pass.target_row_K.tolist(), strict=True))
        tree, row_R = forward_pass.tree, forward_pass.row_R
        paths = [tree.path(int(row_R[row_of[number]])) for number in range(len(prompts))]
        attend = PromptAttention(self._scorer.build_attention(forward_pass, PrefixKeyValues()), cache, paths)
        x_RD = self._scorer.run_pass(forward_pass, attend)
        tokens = self._scorer.choose_tokens(x_RD, len(row_R), self._vocab_size)
        return [tokens[row_of[number]] for number in range(len(prompts))]


def choose_max_cached(decoder: Decoder) -> int:
    """Return how many tokens the KV cache of a batch may have, by the memory that is free now."""
    weight = next(decoder.parameters())
    token_bytes = cache_token_bytes(
        decoder.spec, weight.dtype.itemsize, layers=len(decoder.stage.layers), tp=decoder.tp.size
    )
    return int(_CACHE_SHARE * free_memory(weight.device)) // token_bytes
