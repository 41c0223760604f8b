"""Matrix products of the layers in FP8 (arXiv:2209.05433), with torch's scaled matrix product.

Each factor is divided by a scale that maps its largest magnitude to the format's largest, and rounded: one
scale per tensor, computed from the tensor itself each time (current scaling: no amax history, and so no
state). Inputs and weights are e4m3; gradients of outputs are e5m2 with `hybrid`, e4m3 with `e4m3`. Products
accumulate in float32; sums over ranks, and everything else, stay in bfloat16.

The shards of a tensor on the ranks of tp share one scale, so a layer split over tp multiplies the same
numbers as in one process. With sequence parallelism tokens are gathered in FP8, half the bytes.

A GPU multiplies only factors that are contiguous along the summed dimension (cuBLASLt's TN; Hopper has no
other), so backward transposes its factors.

Legend: T tokens; I, O this rank's widths; M, N, K of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mega_model.distributed.mesh import Axis
from mega_model.weight_gradients import WeightGradients
from mega_schema.fp8_recipe import MULTIPLE, Fp8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_GRADIENT_DTYPES = MappingProxyType({"e4m3": E4M3, "hybrid": E5M2})
_MIN_AMAX = 1e-30  # lower bound of the largest magnitude: a tensor of zeros gets a finite scale


class Fp8Tensor(NamedTuple):
    """A quantized tensor: FP8 `values` times `scale`, a float32 number of shape ()."""

    values: Tensor
    scale: Tensor


def unsupported_reason(device: torch.device) -> str:
    """Return the reason why a device cannot multiply in FP8, or "". A CPU can, more slowly than bfloat16."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"a GPU of compute capability {major}.{minor}"


def quantize(x: Tensor, dtype: torch.dtype, axis: Axis | None = None) -> Fp8Tensor:
    """Quantize x to FP8.

    Args:
        axis: ranks that hold other shards of the same tensor; all of them use one scale.
    """
    amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    if axis is not None:
        axis.reduce(amax, "max")
    return quantize_with_scale(x, dtype, amax.clamp(min=_MIN_AMAX) / torch.finfo(dtype).max)


def quantize_with_scale(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Fp8Tensor:
    """Quantize x to FP8 with a known scale."""
    return Fp8Tensor((x.float() / scale).to(dtype), scale)


def matmul(a_MK: Fp8Tensor, b_NK: Fp8Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute a bᵀ, (M, N), of contiguous factors; K, and on a GPU N, must be multiples of `MULTIPLE`.

    Args:
        dtype: of the result: bfloat16 or float32.
        fast: on Hopper, accumulate in fewer bits; Transformer Engine does so in forward only.
    """
    b_KN = b_NK.values.t()
    return torch._scaled_mm(
        a_MK.values, b_KN, scale_a=a_MK.scale, scale_b=b_NK.scale, out_dtype=dtype, use_fast_accum=fast
    )


def transpose(a_MK: Fp8Tensor) -> Fp8Tensor:
    """Return aᵀ, (K, M), contiguous, with M padded with zeros to a multiple of `MULTIPLE`."""
    bytes_KM = a_MK.values.view(torch.uint8).t()
    if padding := -bytes_KM.shape[1] % MULTIPLE:
        bytes_KM = F.pad(bytes_KM, (0, padding))
    return Fp8Tensor(bytes_KM.contiguous().view(a_MK.values.dtype), a_MK.scale)


def column_linear(
    x_TI: Tensor, weight_OI: nn.Parameter, tp: Axis, gradients: WeightGradients, recipe: Fp8Recipe
) -> Tensor:
    """Compute x Wᵀ, (T, O), as `mega_model.tensor_parallel_ops.column_linear` without a bias."""
    y: Tensor = _ColumnLinear.apply(x_TI, weight_OI, tp, gradients, recipe)
    return y


def row_linear(
    x_TI: Tensor, weight_OI: nn.Parameter, tp: Axis, gradients: WeightGradients, recipe: Fp8Recipe
) -> Tensor:
    """Compute x Wᵀ summed over the ranks, (T, O), as `mega_model.tensor_parallel_ops.row_linear`."""
    y: Tensor = _RowLinear.apply(x_TI, weight_OI, tp, gradients, recipe)
    return y


def _gather_tokens(x: Fp8Tensor, tp: Axis) -> Callable[[], Fp8Tensor]:
    """Start to gather the tokens of all ranks, which share one scale; calling the result waits for them."""
    gathering = tp.enter(x.values.view(torch.uint8))
    return lambda: Fp8Tensor(gathering.wait().view(x.values.dtype), x.scale)


def _scale_axis(tp: Axis) -> Axis | None:
    """Return the ranks that share a scale for tokens: those of tp with sequence parallelism, else None."""
    return tp if tp.sequence else None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: nn.Parameter,
        tp: Axis,
        gradients: WeightGradients,
        recipe: Fp8Recipe,
    ) -> Tensor:
        x = quantize(x_TI, E4M3, _scale_axis(tp))
        gather_x = _gather_tokens(x, tp)
        weight = quantize(weight_OI, E4M3, tp)
        ctx.weight = weight_OI
        ctx.tp = tp
        ctx.gradients = gradients
        ctx.recipe = recipe
        ctx.save_for_backward(weight.scale, *(x if recipe.weight_gradients else (x_TI,)))
        return matmul(gather_x(), weight, x_TI.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        weight_scale, *saved_x = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        tp = ctx.tp
        gradients = ctx.gradients
        in_fp8 = ctx.recipe.weight_gradients

        def gather_x() -> Callable[[], Any]:
            return _gather_tokens(Fp8Tensor(*saved_x), tp) if in_fp8 else tp.enter(saved_x[0]).wait

        x = gather_x() if needs_weight and not gradients.is_deferring else lambda: gather_x()()
        grad = quantize(grad_TO, _GRADIENT_DTYPES[ctx.recipe.format], tp)
        grad_x = None
        grad_weight = None
        if needs_x:
            weight = quantize_with_scale(ctx.weight, E4M3, weight_scale)
            grad_x = tp.leave(matmul(grad, transpose(weight), grad_TO.dtype))
        if needs_weight and in_fp8:
            grad_weight = gradients.accumulate_with(ctx.weight, _weight_gradient(grad, x))
        elif needs_weight:
            grad_weight = gradients.accumulate(ctx.weight, x, grad_TO)
        return None if grad_x is None else grad_x.wait(), grad_weight, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: nn.Parameter,
        tp: Axis,
        gradients: WeightGradients,
        recipe: Fp8Recipe,
    ) -> Tensor:
        x, weight = quantize(x_TI, E4M3, tp), quantize(weight_OI, E4M3, tp)
        ctx.weight = weight_OI
        ctx.tp = tp
        ctx.gradients = gradients
        ctx.recipe = recipe
        ctx.save_for_backward(weight.scale, *(x if recipe.weight_gradients else (x_TI,)))
        return tp.leave(matmul(x, weight, x_TI.dtype, fast=True)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        weight_scale, *saved_x = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        tp = ctx.tp
        gradients = ctx.gradients
        gradient_dtype = _GRADIENT_DTYPES[ctx.recipe.format]
        grad_x = grad_weight = None
        if ctx.recipe.weight_gradients:
            grad = _gather_tokens(quantize(grad_TO, gradient_dtype, _scale_axis(tp)), tp)()
        else:
            grad_TO = tp.enter(grad_TO).wait()
            grad = quantize(grad_TO, gradient_dtype)
        if needs_x:
            weight = quantize_with_scale(ctx.weight, E4M3, weight_scale)
            grad_x = matmul(grad, transpose(weight), grad_TO.dtype)
        if needs_weight and ctx.recipe.weight_gradients:
            grad_weight = gradients.accumulate_with(
                ctx.weight, _weight_gradient(grad, lambda: Fp8Tensor(*saved_x))
            )
        elif needs_weight:
            grad_weight = gradients.accumulate(ctx.weight, lambda: saved_x[0], grad_TO)
        return grad_x, grad_weight, None, None, None


def _weight_gradient(grad_TO: Fp8Tensor, x_TI: Callable[[], Fp8Tensor]) -> Callable[[Tensor], object]:
    """Return a function that adds gradᵀ x to a float32 tensor."""
    return lambda main_OI: main_OI.add_(matmul(transpose(grad_TO), transpose(x_TI()), torch.float32))
