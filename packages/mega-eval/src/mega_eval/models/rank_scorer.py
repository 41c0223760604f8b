"""Score windows by a decoder that is split over tensor and pipeline parallel ranks.

Every rank of a model copy makes the same passes. A stage sends its activations to the next stage and starts
the next pass. Of the logits only their maximum, their sum of exponents and that of the targets are exchanged
(arXiv:1909.08053 section 3).

Legend: T tokens of a pass; R tokens that make a scored prediction; C of them at a time; K scored predictions;
D width; v this rank's columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mega_eval.batch_size import Result, choose_max_tokens
from mega_eval.forward_plan import ForwardPass
from mega_eval.scorer import ModelScorer
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_schema.errors import ConfigError


class RankScorer(ModelScorer):
    """A `ModelScorer` of one rank. Only the first tensor parallel rank of the last stage has scores.

    Args:
        decoder: this rank's stage and slice.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh, *, batch_size: int | None = None) -> None:
        # the plans of all ranks must be equal: the rank with the least memory decides
        max_tokens = -mesh.all_reduce_max(-choose_max_tokens(decoder))
        super().__init__(decoder, batch_size=batch_size, max_tokens=max_tokens)
        self._mesh = mesh

    @property
    def has_scores(self) -> bool:
        """Whether this rank reports the scores of its model copy."""
        return self._decoder.stage.is_last and self._mesh.tp.rank == 0

    def run_decoder(
        self, token_T: Tensor, position_T: Tensor, attend: AttentionBackend, row_R: Tensor | None = None
    ) -> Tensor:
        """Run this stage; the last one returns the states, the others pass (T, D) on and return no rows."""
        channels = self._mesh.channels
        x = token_T
        if channels.input is not None:
            dtype = next(self._decoder.parameters()).dtype
            shape = (len(position_T), self._decoder.spec.hidden)
            x = channels.input.begin(torch.empty(shape, dtype=dtype, device=self.device)).wait()
        x_TD = super().run_decoder(x, position_T, attend, row_R)
        if channels.output is None:
            return x_TD
        channels.output.begin(x_TD.contiguous()).wait()
        return x_TD[:0]

    def choose_tokens(self, x_BD: Tensor, rows: int, vocab_size: int) -> list[int]:
        """Return the most probable token below `vocab_size` of each row, on every rank of the copy."""
        token_B = torch.zeros(rows, dtype=torch.int64, device=self.device)
        if self._decoder.stage.is_last:
            best = [self._reduce_best(self._local_logits(x_CD, vocab_size))[1] for x_CD in self._chunks(x_BD)]
            token_B = torch.cat(best)
        tokens: list[int] = self._mesh.pp.reduce(token_B, "sum").tolist()
        return tokens

    def call_within_memory(self, function: Callable[[], Result], tokens: int) -> Result:
        """Return what a function computes.

        Raises:
            ConfigError: it does not fit in memory; the other ranks continue their plan.
        """
        result = super().call_within_memory(function, tokens)
        if result is None:
            raise ConfigError(
                "--load",
                f"a pass of {tokens} tokens does not fit in memory",
                hint="--micro-batch-size 1, or more ranks",
            )
        return result

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
        parts = []
        for x_CD in self._chunks(x_RD):
            parts.append(self._reduce_logits(x_CD, row_K, target_K))
            row_K = row_K - len(x_CD)
        logprob_K, greedy_K = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
        return logprob_K.cpu(), greedy_K.cpu()

    def _local_logits(self, x_CD: Tensor, vocab_size: int) -> Tensor:
        """Return this rank's columns of the logits, (C, v) float32; those past the vocabulary are -inf."""
        logits_Cv = self._decoder.logits(x_CD).float()
        logits_Cv[:, max(0, vocab_size - self._mesh.tp.rank * logits_Cv.shape[1]) :] = -torch.inf
        return logits_Cv

    def _reduce_best(self, logits_Cv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the highest logit of all columns, and the first token that has it, (C,) each."""
        tp = self._mesh.tp
        columns = logits_Cv.shape[1]
        max_C, best_C = logits_Cv.max(1)
        highest_C = tp.reduce(max_C.clone(), "max")
        greedy_C = torch.where(max_C == highest_C, best_C + tp.rank * columns, tp.size * columns)
        return highest_C, tp.reduce(greedy_C, "min")

    def _reduce_logits(self, x_CD: Tensor, row_K: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return ln P and the greedy choice, (K,) each, of the targets whose row is in [0, C); else 0."""
        tp = self._mesh.tp
        logits_Cv = self._local_logits(x_CD, self.vocab_size)
        highest_C, greedy_C = self._reduce_best(logits_Cv)
        offset = tp.rank * logits_Cv.shape[1]
        sum_C = tp.reduce((logits_Cv - highest_C[:, None]).exp().sum(1), "sum")
        is_here_K = (row_K >= 0) & (row_K < len(x_CD))
        row_K = row_K.clamp(0, len(x_CD) - 1)
        column_K = target_K - offset
        is_ours_K = (column_K >= 0) & (column_K < logits_Cv.shape[1])
        own_K = logits_Cv[row_K, column_K.clamp(0, logits_Cv.shape[1] - 1)]
        target_logit_K = tp.reduce(torch.where(is_ours_K, own_K, 0.0), "sum")
        logprob_K = target_logit_K.double() - (highest_C + sum_C.log()).double()[row_K]
        return torch.where(is_here_K, logprob_K, 0.0), torch.where(is_here_K, greedy_C[row_K], 0)
