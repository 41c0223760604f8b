"""Score windows by a decoder that is split over tensor and pipeline parallel ranks.

Every rank of a model copy makes the same passes. A stage sends its activations to the next stage and starts
the next pass. Of the logits only their maximum, their sum of exponents and that of the targets are exchanged
(arXiv:1909.08053 section 3).

Legend: T tokens of a pass; R tokens that make a scored prediction; C of them at a time; K scored predictions;
D width; v this rank's columns of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mega_eval.batch_size import choose_max_tokens
from mega_eval.forward_plan import ForwardPass
from mega_eval.scorer import MAX_LOGITS, ModelScorer
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_model.token_tree import TokenTree
from mega_model.token_tree_attention import PrefixKeyValues
from mega_schema.errors import ConfigError


class RankScorer(ModelScorer):
    """A `ModelScorer` of one rank. Only the first tensor parallel rank of the last stage has scores.

    Args:
        decoder: this rank's stage and slice.
        vocab_size: words that can be predicted; None: those of the model.
    """

    def __init__(
        self, decoder: Decoder, mesh: Mesh, *, batch_size: int | None = None, vocab_size: int | None = None
    ) -> None:
        # the plans of all ranks must be equal: the rank with the least memory decides
        max_tokens = -mesh.all_reduce_max(-choose_max_tokens(decoder))
        super().__init__(decoder, batch_size=batch_size, max_tokens=max_tokens)
        self.vocab_size = vocab_size or self.vocab_size
        self._mesh = mesh

    @property
    def has_scores(self) -> bool:
        """Whether this rank reports the scores of its model copy."""
        return self._decoder.stage.is_last and self._mesh.tp.rank == 0

    def target_states(self, forward_pass: ForwardPass, prefix: PrefixKeyValues, row_R: Tensor) -> Tensor:
        """Run this stage; the last one returns (R, D), the others pass (T, D) on and return no rows."""
        channels = self._mesh.channels
        x, position_T = (
            torch.from_numpy(array).to(self.device)
            for array in (forward_pass.token_T, forward_pass.tree.position_T)
        )
        if channels.input is not None:
            dtype = next(self._decoder.parameters()).dtype
            shape = (len(position_T), self._decoder.spec.hidden)
            x = channels.input.begin(torch.empty(shape, dtype=dtype, device=self.device)).wait()
        attend = self.build_attention(forward_pass, prefix)
        x_TD = self._decoder.hidden_states(x, position_T, attend, row_R=row_R)
        if channels.output is None:
            return x_TD
        channels.output.begin(x_TD.contiguous()).wait()
        return x_TD[:0]

    def _try_pass(self, forward_pass: ForwardPass, prefix: PrefixKeyValues) -> tuple[Tensor, Tensor]:
        scores = super()._try_pass(forward_pass, prefix)
        if scores is None:  # the other ranks have gone on with another plan
            raise ConfigError(
                "--load",
                f"a pass of {forward_pass.tree.tokens} tokens does not fit in memory",
                hint="--micro-batch-size 1, or more ranks",
            )
        return scores

    def _score_rows(self, forward_pass: ForwardPass, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        if not self._decoder.stage.is_last:
            count = len(forward_pass.target_K)
            return torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
        if self._mesh.tp.size == 1:
            return super()._score_rows(forward_pass, x_RD)
        target_K, row_K = (
            torch.from_numpy(array).to(self.device)
            for array in (forward_pass.target_K, forward_pass.target_row_K)
        )
        chunk_size = max(1, MAX_LOGITS // self.vocab_size)
        parts = [
            self._reduce_logits(x_CD, row_K - start, target_K) for start, x_CD in _chunks(x_RD, chunk_size)
        ]
        logprob_K, greedy_K = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
        return logprob_K.cpu(), greedy_K.cpu()

    def _reduce_logits(self, x_CD: Tensor, row_K: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return ln P and the greedy choice, (K,) each, of the targets whose row is in [0, C); else 0."""
        tp = self._mesh.tp
        logits_Cv = self._decoder.logits(x_CD).float()
        offset = tp.rank * logits_Cv.shape[1]
        # columns past the vocabulary are padding and get no probability
        logits_Cv[:, max(0, self.vocab_size - offset) :] = -torch.inf
        max_C, best_C = logits_Cv.max(1)
        highest_C = tp.reduce(max_C.clone(), "max")
        greedy_C = torch.where(max_C == highest_C, best_C + offset, self.vocab_size)
        tp.reduce(greedy_C, "min")
        sum_C = tp.reduce((logits_Cv - highest_C[:, None]).exp().sum(1), "sum")
        is_here_K = (row_K >= 0) & (row_K < len(x_CD))
        row_K = row_K.clamp(0, len(x_CD) - 1)
        column_K = target_K - offset
        is_ours_K = (column_K >= 0) & (column_K < logits_Cv.shape[1])
        own_K = logits_Cv[row_K, column_K.clamp(0, logits_Cv.shape[1] - 1)]
        target_logit_K = tp.reduce(torch.where(is_ours_K, own_K, 0.0), "sum")
        logprob_K = target_logit_K.double() - (highest_C + sum_C.log()).double()[row_K]
        return torch.where(is_here_K, logprob_K, 0.0), torch.where(is_here_K, greedy_C[row_K], 0)

    @torch.inference_mode()
    def next_token(self, token_T: list[int], cached: int, prefix: PrefixKeyValues) -> int:
        """Return the most probable token after some tokens, on every rank of the model copy.

        Args:
            cached: tokens before them, whose keys and values `prefix` holds; those of `token_T` are appended.
        """
        count = len(token_T)
        zero = np.zeros(1, np.intp)
        tree = TokenTree(np.full(1, -1, np.intp), np.full(1, count, np.intp), cached)
        last = np.full(1, count - 1, np.intp)
        forward_pass = ForwardPass(
            tree, np.array(token_T, np.int64), last, np.zeros(1, np.int64), zero, zero, zero, stores=True
        )
        _, greedy_K = self._try_pass(forward_pass, prefix)
        return int(self._mesh.pp.reduce(greedy_K.to(self.device), "sum"))


def _chunks(x_RD: Tensor, size: int) -> list[tuple[int, Tensor]]:
    return [(start, x_RD[start : start + size]) for start in range(0, len(x_RD), size)]
