"""Compute the log-probabilities of the targets of windows. The only module here that imports torch.

Shapes: B windows of a batch, S tokens of its longest, T = B S, K number of targets, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_eval.models.interface import WindowScores
from mega_eval.windows import Window, batch_windows
from mega_model.attention_backends import PackedAttention
from mega_model.decoder import Decoder

MAX_LOGITS = 1 << 23  # elements of logits in memory: 32 MiB of float32; larger chunks are slower on a CPU


class ModelScorer:
    """Scores windows by a decoder.

    Args:
        decoder: the whole model on one device.
        batch_size: windows in one forward pass. It changes speed and memory, not the result.
    """

    def __init__(self, decoder: Decoder, *, batch_size: int = 16) -> None:
        self.context_length = decoder.spec.max_seq_len
        self.vocab_size = decoder.spec.vocab
        self._decoder = decoder.eval()
        self._batch_size = batch_size

    @torch.inference_mode()
    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield the scores of a batch of windows at a time, as `RequestModel.score_batches` does."""
        for indices in batch_windows(windows, self._batch_size):
            if all(index in answered for index in indices):
                continue
            batch = [windows[index] for index in indices]
            logprob_K, greedy_K, target_K = self._score_batch(batch)
            ends = np.cumsum([window.target_length for window in batch])[:-1]
            columns = (np.split(column, ends) for column in (logprob_K, greedy_K == target_K, greedy_K))
            yield [(index, WindowScores(*row)) for index, *row in zip(indices, *columns, strict=True)]

    def _score_batch(
        self, batch: Sequence[Window]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return ln P of every target, the greedy choice, and the target, windows end to end; all (K,)."""
        longest = max(window.input_length for window in batch)
        assert longest <= self.context_length, f"{longest} tokens for a context of {self.context_length}"
        device = next(self._decoder.parameters()).device
        # padding on the right: causal attention keeps it out of the positions before it
        token_BS = np.zeros((len(batch), longest), dtype=np.int64)
        for row, window in enumerate(batch):
            token_BS[row, : window.input_length] = window.tokens[:-1]
        index_K = np.concatenate(
            [
                np.arange(window.input_length - window.target_length, window.input_length) + row * longest
                for row, window in enumerate(batch)
            ]
        )
        target_K = np.concatenate([window.targets for window in batch])
        position_T = torch.arange(longest, device=device).repeat(len(batch))
        token_T = torch.as_tensor(token_BS, device=device).flatten()
        x_TD = self._decoder.hidden_states(
            token_T, position_T, PackedAttention(rows=len(batch), length=longest)
        )
        x_KD = x_TD[torch.as_tensor(index_K, device=device)]
        chunks = list(self._score_chunks(x_KD, torch.as_tensor(target_K, device=device)))
        logprob_K, greedy_K = (torch.cat(column).cpu().numpy() for column in zip(*chunks, strict=True))
        return logprob_K, greedy_K, target_K

    def _score_chunks(self, x_KD: Tensor, target_K: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scores of a chunk of targets at a time, so that the logits of all never exist at once."""
        chunk_size = max(1, MAX_LOGITS // self.vocab_size)
        for start in range(0, len(target_K), chunk_size):
            target = target_K[start : start + chunk_size]
            # columns past the vocabulary are padding and get no probability
            logits = self._decoder.logits(x_KD[start : start + chunk_size])[:, : self.vocab_size].float()
            target_logits = logits.gather(1, target[:, None])[:, 0]
            logprobs = target_logits.double() - logits.logsumexp(1).double()
            yield logprobs, logits.argmax(1)
