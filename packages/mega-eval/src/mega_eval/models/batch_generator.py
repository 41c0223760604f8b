"""Continue prompts greedily in batches, whose rows leave as they finish.

Legend: B rows; R different ends of prompts; T tokens of the prompts, shared ones once; D width; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from mega_eval.batch_size import choose_max_tokens, free_memory
from mega_eval.forward_plan import plan_passes
from mega_eval.generation_plan import plan_batches
from mega_eval.models.greedy_continuation import GreedyContinuation, cut_prompt
from mega_eval.models.interface import GenerationRequest
from mega_eval.scorer import MAX_LOGITS, ModelScorer
from mega_eval.windows import Window, as_tokens
from mega_model.decoder import Decoder
from mega_model.row_cache import PromptAttention, RowCache, cache_token_bytes
from mega_model.token_tree_attention import PrefixKeyValues
from mega_schema.tokenizer.tokenizer import Tokenizer

MAX_ROWS = 256  # answers are kept after each batch: an interruption loses no more than these
_CACHE_SHARE = 0.25  # of the free memory; leaving rows copies the cache


class BatchGenerator:
    """Continues prompts by a decoder.

    Args:
        scorer: of the same decoder; its attention computes the prompts.
        batch_size: prompts of a batch at most; None: as many as fit.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, scorer: ModelScorer, *, batch_size: int | None = None
    ) -> None:
        self._decoder = decoder.eval()
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._batch_size = batch_size
        # a tokenizer may have fewer tokens than the model
        self._vocab_size = min(decoder.spec.vocab, tokenizer.identity.vocab_size)

    @torch.inference_mode()
    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield the continuations of a batch at a time, as `RequestModel.generate_batches` does.

        Raises:
            RequestError: a prompt has no tokens.
        """
        prompts = [cut_prompt(request, self._scorer.context_length) for request in requests]
        weight = next(self._decoder.parameters())
        cache_bytes = _CACHE_SHARE * free_memory(weight.device)
        batches = plan_batches(
            prompts,
            [request.max_tokens for request in requests],
            max_tokens=choose_max_tokens(self._decoder),
            max_cached=int(cache_bytes // cache_token_bytes(self._decoder.spec, weight.dtype.itemsize)),
            max_rows=self._batch_size or MAX_ROWS,
        )
        for batch in batches:
            if not all(number in answered for number in batch):
                texts = self._generate(
                    [prompts[number] for number in batch], [requests[number] for number in batch]
                )
                yield list(zip(batch, texts, strict=True))

    def _generate(self, prompts: Sequence[Sequence[int]], requests: Sequence[GenerationRequest]) -> list[str]:
        """Return the continuations of a batch."""
        weight = next(self._decoder.parameters())
        continuations = [GreedyContinuation(request, self._tokenizer) for request in requests]
        cache = RowCache(
            self._decoder.spec,
            [len(prompt) for prompt in prompts],
            new_tokens=max(request.max_tokens for request in requests) - 1,
            dtype=weight.dtype,
            device=weight.device,
        )
        tokens = self._read_prompts(prompts, cache)
        rows = continuations
        while True:
            for row, token in zip(rows, tokens, strict=True):
                row.add(token)
            left = [number for number, row in enumerate(rows) if not row.is_finished]
            if not left:
                return [continuation.text for continuation in continuations]
            if len(left) < len(rows):
                cache.select(left)
                rows = [rows[number] for number in left]
            token_B = torch.tensor([row.ids[-1] for row in rows], device=weight.device)
            position_B = torch.tensor(cache.positions, device=weight.device)
            tokens = self._choose_tokens(self._decoder.hidden_states(token_B, position_B, cache))

    def _read_prompts(self, prompts: Sequence[Sequence[int]], cache: RowCache) -> list[int]:
        """Run one forward pass over the prompts, fill the cache, and return the token after each."""
        device = self._scorer.device
        windows = [Window(as_tokens([*prompt, 0]), 1) for prompt in prompts]
        (forward_pass,) = plan_passes(windows, max_tokens=sum(map(len, prompts)))
        row_of = dict(zip(forward_pass.window_K.tolist(), forward_pass.target_row_K.tolist(), strict=True))
        tree, row_R = forward_pass.tree, forward_pass.row_R
        paths = [tree.path(int(row_R[row_of[number]])) for number in range(len(prompts))]
        token_T, position_T = (
            torch.from_numpy(x).to(device) for x in (forward_pass.token_T, tree.position_T)
        )
        attend = PromptAttention(self._scorer.build_attention(forward_pass, PrefixKeyValues()), cache, paths)
        x_RD = self._decoder.hidden_states(
            token_T, position_T, attend, row_R=torch.from_numpy(row_R).to(device)
        )
        tokens = self._choose_tokens(x_RD)
        return [tokens[row_of[number]] for number in range(len(prompts))]

    def _choose_tokens(self, x_BD: Tensor) -> list[int]:
        """Return the most probable token of each row, with the logits of a few rows at a time."""
        chunk_size = max(1, MAX_LOGITS // self._scorer.vocab_size)
        best = [
            self._decoder.logits(x_BD[start : start + chunk_size])[:, : self._vocab_size].argmax(1)
            for start in range(0, len(x_BD), chunk_size)
        ]
        tokens: list[int] = torch.cat(best).tolist()
        return tokens
