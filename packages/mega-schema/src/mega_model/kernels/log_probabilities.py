"""Log-probabilities in an order that neither the batch nor the split of the vocabulary changes.

log p = (z - max z) - log Σ exp(z - max z). The terms of the sum are integers, multiples of 2^-40, so the sum
is the same in any order; the rest is float64, rounded once to float32. Training and the server both call
this.

Legend: C rows; V this rank's columns of the vocabulary, without padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel
from mega_model.kernels.reference import IGNORED


class LogProbabilities:
    """The functions, with the kernels they call."""

    def __init__(self, kernels: NumbaKernels) -> None:
        self._elementary = kernels.elementary

    def losses(self, logits_CV: Tensor, target_C: Tensor, tp: Axis) -> Tensor:
        """Return the negated log-probability of every target, (C,) float32; arguments as `CrossEntropy`."""
        largest_C, log_sum_C = self._log_sums(logits_CV, tp)
        at_target_C = torch.zeros(len(logits_CV), dtype=torch.float32)
        if logits_CV.shape[1]:
            row_C = torch.arange(len(target_C))
            at_target_C = torch.where(target_C >= 0, logits_CV[row_C, target_C.clamp(min=0)].float(), 0.0)
        at_target_C = tp.reduce(at_target_C)  # one rank has it, the others add zero
        return torch.where(target_C == IGNORED, 0.0, -_subtract(at_target_C, largest_C, log_sum_C))

    def log_softmax(self, logits_CV: Tensor) -> Tensor:
        """Return the log-probabilities of whole rows, (C, V) float32."""
        largest_C, log_sum_C = self._log_sums(logits_CV, Axis("tp"))
        return _subtract(logits_CV, largest_C[:, None], log_sum_C[:, None])

    def _log_sums(self, logits_CV: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
        """Return the largest logit of a row, float32, and log Σ exp(z - largest), float64."""
        rows = len(logits_CV)
        largest_C = torch.full((rows,), -torch.inf)
        if logits_CV.shape[1]:
            largest_C = logits_CV.amax(1).float()
        largest_C = tp.reduce(largest_C, "max")
        sum_C = torch.zeros(rows, dtype=torch.int64)
        run_kernel(self._elementary, "exp_sums", as_array(logits_CV), as_array(largest_C), sum_C.numpy())
        unit = -self._elementary.SUM_BITS * math.log(2)
        logs = [math.log(total) + unit if total > 0 else math.nan for total in tp.reduce(sum_C).tolist()]
        return largest_C, torch.tensor(logs, dtype=torch.float64)


def _subtract(logits: Tensor, largest: Tensor, log_sum: Tensor) -> Tensor:
    return ((logits.double() - largest.double()) - log_sum).float()
