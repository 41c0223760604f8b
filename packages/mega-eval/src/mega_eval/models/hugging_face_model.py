"""A model of `transformers`, loaded into this process, as a model for the tasks.

Legend: B windows of a batch; T tokens of the longest; S last positions that have logits; V vocabulary;
M targets of a window.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_eval.batch_size import (
    CPU_TOKENS,
    GPU_TOKENS,
    call_within_memory,
    free_memory,
    window_size_error,
)
from mega_eval.models.greedy_continuation import GreedyContinuation, answer_batches, cut_prompt
from mega_eval.models.interface import GenerationRequest, ModelIdentity, WindowScores
from mega_eval.windows import Window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

MAX_LOGITS = 1 << 27  # elements of a batch's logits: 512 MiB of float32
_TOKEN_WIDTHS = 32  # activations of a token in a layer, in widths of the embedding
_LAYERS = 64  # of a model whose config does not tell
_MAX_ROWS = 64  # of a batch of continuations; the longest answer decides how long all rows are computed
_MAX_CACHED = 1 << 18  # rows times columns of the KV cache


class HuggingFaceModel:
    """A causal model of `transformers` on one device with its tokenizer.

    Args:
        module: the model; computes logits (B, S, V) from ids and an attention mask, both (B, T).
        batch_size: windows of one forward pass at most; None: as many as fit in memory.
        vocab_size: columns of the logits that are tokens.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Tokenizer,
        identity: ModelIdentity,
        *,
        vocab_size: int,
        context_length: int,
        batch_size: int | None = None,
    ) -> None:
        self._module = module
        self._device = next(module.parameters()).device
        self._batch_size = batch_size
        self._limits_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.tokenizer = tokenizer
        self.identity = identity
        self.vocab_size = vocab_size
        self.context_length = context_length

    @torch.inference_mode()
    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield scores, as `RequestModel.score_batches` does, the longest windows first.

        A batch that does not fit in memory is cut into halves; the smaller size stays.

        Raises:
            ConfigError: one window alone does not fit.
        """
        numbers = [number for number, window in enumerate(windows) if window.target_length]
        order = sorted(numbers, key=lambda number: (-windows[number].input_length, number))
        max_tokens = self._choose_max_tokens()
        start = 0
        while start < len(order):
            batch = self._take_batch(windows, order, start, max_tokens)
            if not all(number in answered for number in batch):
                score = partial(self._score, [windows[number] for number in batch])
                scores = call_within_memory(score, self._device)
                if scores is None:
                    max_tokens = _halve_batch(batch, windows)
                    continue
                yield list(zip(batch, scores, strict=True))
            start += len(batch)

    def _choose_max_tokens(self) -> int:
        """Return how many tokens a forward pass may have, padding included."""
        limit = CPU_TOKENS if self._device.type == "cpu" else GPU_TOKENS
        token_bytes = _TOKEN_WIDTHS * self._width_bytes()
        return max(1, min(limit, free_memory(self._device) // 2 // token_bytes))

    def _width_bytes(self) -> int:
        """Return the bytes of a token's embedding."""
        weight_VD = self._module.get_input_embeddings().weight
        return int(weight_VD.shape[1] * weight_VD.itemsize)

    def _take_batch(
        self, windows: Sequence[Window], order: Sequence[int], start: int, max_tokens: int
    ) -> list[int]:
        """Return the next windows of the order that one forward pass can score, at least one."""
        longest = windows[order[start]].input_length
        batch: list[int] = []
        first = longest
        for number in order[start : start + max(1, max_tokens)]:
            window, count = windows[number], len(batch) + 1
            first = min(first, window.input_length - window.target_length)
            is_full = count * longest > max_tokens or count > (self._batch_size or count)
            if batch and (is_full or count * (longest - first) * self.vocab_size > MAX_LOGITS):
                break
            batch.append(number)
        return batch

    def _score(self, windows: Sequence[Window]) -> list[WindowScores]:
        """Score windows in one forward pass."""
        longest = max(window.input_length for window in windows)
        first = min(window.input_length - window.target_length for window in windows)
        ids_BT = np.zeros((len(windows), longest), np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for row, window in enumerate(windows):
            ids_BT[row, : window.input_length] = window.tokens[:-1]
            mask_BT[row, : window.input_length] = 1
        logits_BSV = self._compute_logits(
            torch.from_numpy(ids_BT), torch.from_numpy(mask_BT), longest - first
        )
        scores = []
        for row, window in enumerate(windows):
            end = window.input_length - first
            logits_MV = logits_BSV[row, end - window.target_length : end].float()
            target_M = torch.from_numpy(window.targets.copy()).to(self._device)
            target_logit_M = logits_MV.gather(1, target_M[:, None])[:, 0].double()
            logprob_M = target_logit_M - logits_MV.logsumexp(1).double()
            greedy = logits_MV.argmax(1).cpu().numpy()
            scores.append(WindowScores(logprob_M.cpu().numpy(), greedy == window.targets, greedy))
        return scores

    def _compute_logits(self, ids_BT: Tensor, mask_BT: Tensor, count: int) -> Tensor:
        """Return the logits of the last `count` positions, (B, count, V), in the model's dtype."""
        options = {"logits_to_keep": count} if self._limits_logits else {}
        output = self._module(
            input_ids=ids_BT.to(self._device),
            attention_mask=mask_BT.to(self._device),
            use_cache=False,
            **options,
        )
        logits_BSV: Tensor = output.logits[:, -count:, : self.vocab_size]
        return logits_BSV

    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield continuations, as `RequestModel.generate_batches` does, those of the longest prompts first.

        Raises:
            RequestError: a prompt has no tokens.
            ConfigError: one prompt alone does not fit in memory.
        """
        chosen = [cut_prompt(request, self.context_length) for request in requests]

        def generate(batch: Sequence[GenerationRequest]) -> list[str] | None:
            return call_within_memory(partial(self._generate, batch), self._device)

        return answer_batches(self._plan_generation(chosen), chosen, answered, generate)

    def _plan_generation(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Return batches of requests, by their numbers, those of the longest prompts first."""
        layers = getattr(self._module.config.get_text_config(), "num_hidden_layers", _LAYERS)
        cached_bytes = 2 * layers * self._width_bytes()
        max_cached = min(_MAX_CACHED, free_memory(self._device) // 4 // cached_bytes)
        batches: list[list[int]] = []
        longest = most_new = 0
        for number in sorted(range(len(requests)), key=lambda n: (-len(requests[n].prompt), n)):
            request = requests[number]
            rows = len(batches[-1]) + 1 if batches else 0
            most_new = max(most_new, request.max_tokens)
            columns = longest + most_new  # all rows are computed until the last has finished
            if (
                not 0 < rows <= (self._batch_size or _MAX_ROWS)
                or columns > self.context_length
                or rows * columns > max_cached
            ):
                batches.append([])
                longest, most_new = len(request.prompt), request.max_tokens
            batches[-1].append(number)
        return batches

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Continue prompts, padded on the left, each until its document ends or has a stop string."""
        from transformers import GenerationConfig, StoppingCriteriaList

        continuations = [GreedyContinuation(request, self.tokenizer) for request in requests]

        def find_finished(ids_BT: Tensor, scores: object, **options: object) -> Tensor:
            for continuation, token in zip(continuations, ids_BT[:, -1].tolist(), strict=True):
                if not continuation.is_finished:
                    continuation.add(token)
            finished = [continuation.is_finished for continuation in continuations]
            return torch.tensor(finished, device=ids_BT.device)

        longest = max(len(request.prompt) for request in requests)
        eod = self.tokenizer.identity.eod
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in requests),
            pad_token_id=eod or 0,
            suppress_tokens=list(range(self.tokenizer.identity.vocab_size, self.vocab_size)) or None,
        )
        ids_BT = torch.full((len(requests), longest), eod or 0)
        mask_BT = torch.zeros_like(ids_BT)
        for row, request in enumerate(requests):
            first = longest - len(request.prompt)
            ids_BT[row, first:] = torch.tensor(request.prompt)
            mask_BT[row, first:] = 1
        self._module.generate(
            ids_BT.to(self._device),
            attention_mask=mask_BT.to(self._device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([find_finished]),
        )
        return [continuation.text for continuation in continuations]

    def check_causal(self) -> None:
        """Check that the logits of a token do not change with a later token.

        Raises:
            FormatError: they do, as those of an encoder.
        """
        length = min(8, self.context_length)
        ids_BT = (torch.arange(length) % self.vocab_size).repeat(2, 1)
        ids_BT[1, -1] = (ids_BT[0, -1] + 1) % self.vocab_size
        with torch.inference_mode():
            logits_BSV = self._compute_logits(ids_BT, torch.ones_like(ids_BT), length)
        before_BSV = logits_BSV[:, :-1].log_softmax(-1)
        tolerance = torch.finfo(before_BSV.dtype).eps ** 0.5
        if not torch.allclose(before_BSV[0], before_BSV[1], rtol=0, atol=tolerance, equal_nan=True):
            raise FormatError(
                self.identity.source,
                "is not a causal model: its prediction of a token changes with later ones",
                hint='"is_decoder": true in config.json, if it was trained so',
            )

    def close(self) -> None:
        """Nothing is to be ended."""


def _halve_batch(batch: Sequence[int], windows: Sequence[Window]) -> int:
    """Return half the tokens of a batch that did not fit in memory."""
    longest = windows[batch[0]].input_length
    if len(batch) == 1:
        raise window_size_error(longest)
    return len(batch) * longest // 2
