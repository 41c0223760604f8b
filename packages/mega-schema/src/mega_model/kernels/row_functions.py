"""Norms and activations for inference on a CPU, by the numba kernels of `numba.row_kernels`.

One pass over the numbers each, where torch makes one per operation. They have no gradients.

Legend: T tokens; D width of the residual stream; F width inside the feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mega_model.kernels.interface import Kernels
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel


def with_row_functions(base: Kernels, kernels: NumbaKernels) -> Kernels:
    """Return kernels that compute norms and activations by numba, in float32 and bfloat16."""
    functions = RowFunctions(kernels)
    return replace(
        base,
        rms_norm=functions.rms_norm,
        layer_norm=functions.layer_norm,
        add_rms_norm=functions.add_rms_norm,
        add_layer_norm=functions.add_layer_norm,
        bias_gelu=functions.bias_gelu,
        swiglu=functions.swiglu,
    )


class RowFunctions:
    """The functions of `Kernels` of the same names."""

    def __init__(self, kernels: NumbaKernels) -> None:
        self._module = kernels.row_kernels

    def rms_norm(self, x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
        """Compute x / rms(x) · scale."""
        return self._norm(x_TD, scale_D, scale_D[:0], eps)

    def layer_norm(self, x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
        """Compute (x - mean) / deviation · scale + shift."""
        return self._norm(x_TD, scale_D, shift_D, eps)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its RMSNorm."""
        return self._add_norm(x_TD, residual_TD, scale_D, scale_D[:0], eps)

    def add_layer_norm(
        self, x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its LayerNorm."""
        return self._add_norm(x_TD, residual_TD, scale_D, shift_D, eps)

    def bias_gelu(self, x_TF: Tensor, bias_F: Tensor | None, approximate: Literal["none", "tanh"]) -> Tensor:
        """Compute the GELU of x + bias."""
        activation = self._module.GELU_TANH if approximate == "tanh" else self._module.GELU_ERF
        bias_F = x_TF.new_empty(0) if bias_F is None else bias_F
        assert bias_F.shape in ((0,), x_TF.shape[1:]), f"a bias of {tuple(bias_F.shape)}"
        return self._activate(x_TF, bias_F, activation, x_TF.shape[1])

    def swiglu(self, x_TF: Tensor) -> Tensor:
        """Compute silu(gate) · up of the two halves, gate and up."""
        assert x_TF.shape[1] % 2 == 0, f"two halves of {x_TF.shape[1]}"
        return self._activate(x_TF, x_TF.new_empty(0), self._module.SWIGLU, x_TF.shape[1] // 2)

    def _norm(self, x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
        out_TD = _empty_like(x_TD, scale_D, shift_D)
        run_kernel(
            self._module, "norm_rows", *_arrays(x_TD, scale_D, shift_D), np.float32(eps), *_arrays(out_TD)
        )
        return out_TD

    def _add_norm(
        self, x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert residual_TD.shape == x_TD.shape, f"a residual of {tuple(residual_TD.shape)}"
        assert residual_TD.dtype == x_TD.dtype, f"a residual of {residual_TD.dtype}"
        sum_TD, out_TD = (_empty_like(x_TD, scale_D, shift_D) for _ in range(2))
        inputs = _arrays(x_TD, residual_TD, scale_D, shift_D)
        run_kernel(self._module, "add_norm_rows", *inputs, np.float32(eps), *_arrays(sum_TD, out_TD))
        return sum_TD, out_TD

    def _activate(self, x_TF: Tensor, bias_F: Tensor, activation: int, width: int) -> Tensor:
        assert bias_F.dtype == x_TF.dtype, f"a bias of {bias_F.dtype}"
        out_TF = x_TF.new_empty(len(x_TF), width)
        run_kernel(self._module, "activate_rows", *_arrays(x_TF, bias_F), activation, *_arrays(out_TF))
        return out_TF


def _empty_like(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor) -> Tensor:
    """Return memory for the norm of x. The kernels read scale and shift without checks, so all are here."""
    assert scale_D.shape == x_TD.shape[1:], f"a scale of {tuple(scale_D.shape)}"
    assert shift_D.shape in ((0,), x_TD.shape[1:]), f"a shift of {tuple(shift_D.shape)}"
    assert scale_D.dtype == shift_D.dtype == x_TD.dtype, f"a scale of {scale_D.dtype}"
    return torch.empty(x_TD.shape, dtype=x_TD.dtype)


def _arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
    return [as_array(x.contiguous()) for x in tensors]
