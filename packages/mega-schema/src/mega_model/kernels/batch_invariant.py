"""Kernels whose result for a token has the same bits in any batch and any split over tp, for CPUs.

The server's steps and a training forward pass call the same functions, so their log-probabilities are equal
bit for bit (docs/adr/0036). Gradients are those of the ordinary kernels, computed from the same inputs.

What is exact, or rounded once per element by one rule, stays torch's: sums of two tensors, products with a
factor, embedding lookups, rotary positions. F.layer_norm computes row by row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.kernels import reference
from mega_model.kernels.interface import Kernels
from mega_model.kernels.log_probabilities import LogProbabilities
from mega_model.kernels.numba import NumbaKernels, as_array
from mega_model.kernels.ordered_linear import TrainedOrderedLinear
from mega_model.kernels.recomputed_gradient import with_gradient
from mega_model.kernels.row_functions import RowFunctions


def build_kernels(base: Kernels, kernels: NumbaKernels) -> Kernels:
    """Return the batch-invariant kernels.

    Attention is not among them: its backend is `batch_invariant_attention.BatchInvariantAttention`.

    Args:
        base: computes gradients, and everything that is invariant by itself.
    """
    functions = _Functions(base, kernels)
    return replace(
        base,
        rms_norm=functions.rms_norm,
        layer_norm=reference.layer_norm,
        add_rms_norm=functions.add_rms_norm,
        add_layer_norm=reference.add_layer_norm,
        bias_gelu=functions.bias_gelu,
        swiglu=functions.swiglu,
        angles=functions.angles,
        apply_rotary=reference.apply_rotary,
        apply_rotary_packed=reference.apply_rotary_packed,
        cross_entropy=functions.cross_entropy,
        linear=TrainedOrderedLinear(kernels, base.linear),
    )


class _Functions:
    """The functions of `RowFunctions` with gradients, and those of `kernels.numba.elementary`."""

    def __init__(self, base: Kernels, kernels: NumbaKernels) -> None:
        self._base = base
        self._rows = RowFunctions(kernels)
        self._elementary = kernels.elementary
        self._log_probabilities = LogProbabilities(kernels)

    def rms_norm(self, x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
        kernel = partial(self._rows.rms_norm, eps=eps)
        return with_gradient(kernel, lambda x, scale: self._base.rms_norm(x, scale, eps), x_TD, scale_D)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TD = residual_TD + x_TD
        return sum_TD, self.rms_norm(sum_TD, scale_D, eps)

    def bias_gelu(self, x_TF: Tensor, bias_F: Tensor | None, approximate: Literal["none", "tanh"]) -> Tensor:
        def kernel(x_TF: Tensor, *biases: Tensor) -> Tensor:
            return self._rows.bias_gelu(x_TF, biases[0] if biases else None, approximate)

        def definition(x_TF: Tensor, *biases: Tensor) -> Tensor:
            return self._base.bias_gelu(x_TF, biases[0] if biases else None, approximate)

        return with_gradient(kernel, definition, x_TF, *([] if bias_F is None else [bias_F]))

    def swiglu(self, x_TF: Tensor) -> Tensor:
        return with_gradient(self._rows.swiglu, self._base.swiglu, x_TF)

    def angles(self, position_T: Tensor, frequency_R: Tensor) -> tuple[Tensor, Tensor]:
        cos_TR, sin_TR = (torch.empty(len(position_T), len(frequency_R)) for _ in range(2))
        position, frequency = as_array(position_T.float()), as_array(frequency_R)
        self._elementary.angles(position, frequency, as_array(cos_TR), as_array(sin_TR))
        return cos_TR, sin_TR

    def cross_entropy(self, logits_CV: Tensor, target_C: Tensor, tp: Axis, scale: float | None) -> Tensor:
        loss_C = self._log_probabilities.losses(logits_CV, target_C, tp)
        if scale is not None:
            self._base.cross_entropy(logits_CV, target_C, tp, scale)  # overwrites the logits
        return loss_C
