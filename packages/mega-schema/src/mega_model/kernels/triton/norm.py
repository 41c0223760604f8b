"""LayerNorm and RMSNorm, alone or fused with the residual addition: the stream is read and written once.

One program computes a row. In backward every program sums the gradients of scale and shift over its own rows,
at a fixed stride, into a partial sum; so the bits are reproducible.

Legend: T tokens, D hidden, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_PROGRAMS = 512


@triton.jit
def _norm_kernel(
    x, residual, total, y, scale, shift, mean, inverse, width, eps,
    ADD: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    offset = row * width + column
    loaded = tl.load(x + offset, inside, 0.0)
    if ADD:
        loaded = (loaded.to(tl.float32) + tl.load(residual + offset, inside, 0.0).to(tl.float32)).to(
            loaded.dtype
        )
        tl.store(total + offset, loaded, inside)
    value = loaded.to(tl.float32)
    if CENTRED:
        mean_value = tl.sum(value, 0) / width
        value = tl.where(inside, value - mean_value, 0.0)
        tl.store(mean + row, mean_value)
    one_over = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(inverse + row, one_over)
    factor = tl.load(scale + column, inside, 0.0).to(tl.float32)
    value = value * one_over
    if CENTRED:
        value = value * factor + tl.load(shift + column, inside, 0.0).to(tl.float32)
    else:  # rounded like the reference
        value = value.to(loaded.dtype).to(tl.float32) * factor
    tl.store(y + offset, value.to(loaded.dtype), inside)


@triton.jit
def _norm_backward_kernel(
    x, scale, mean, inverse, grad_y, grad_total, grad_x, part_scale, part_shift, rows, width,
    ADD: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(scale + column, inside, 0.0).to(tl.float32)
    sum_scale = tl.zeros((BLOCK,), tl.float32)
    sum_shift = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, programs):
        offset = tl.cast(row, tl.int64) * width + column
        one_over = tl.load(inverse + row)
        value = tl.load(x + offset, inside, 0.0).to(tl.float32)
        grad = tl.load(grad_y + offset, inside, 0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
            sum_shift += grad
        value = value * one_over
        sum_scale += grad * value
        grad = grad * factor
        grad_value = grad - value * (tl.sum(grad * value, 0) / width)
        if CENTRED:
            grad_value = grad_value - tl.sum(grad, 0) / width
        grad_value = grad_value * one_over
        if ADD:
            grad_value += tl.load(grad_total + offset, inside, 0.0).to(tl.float32)
        tl.store(grad_x + offset, grad_value.to(grad_x.dtype.element_ty), inside)
    tl.store(part_scale + first * width + column, sum_scale, inside)
    if CENTRED:
        tl.store(part_shift + first * width + column, sum_shift, inside)


def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm, as `reference.rms_norm`."""
    y: Tensor = _Norm.apply(x_TD, None, scale_D, None, eps)[1]
    return y


def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
    """Compute LayerNorm, as `reference.layer_norm`."""
    y: Tensor = _Norm.apply(x_TD, None, scale_D, shift_D, eps)[1]
    return y


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual and compute RMSNorm, as `reference.add_rms_norm`."""
    outputs: tuple[Tensor, Tensor] = _Norm.apply(x_TD, residual_TD, scale_D, None, eps)
    return outputs


def add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual and compute LayerNorm, as `reference.add_layer_norm`."""
    outputs: tuple[Tensor, Tensor] = _Norm.apply(x_TD, residual_TD, scale_D, shift_D, eps)
    return outputs


class _Norm(torch.autograd.Function):
    """Return the sum (None without a residual) and its norm; save the sum and one or two numbers per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        y = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        mean, inverse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        ctx.add = residual is not None
        ctx.centred = shift is not None
        ctx.block = triton.next_power_of_2(width)
        _norm_kernel[(rows,)](
            x, total if residual is None else residual.contiguous(), total, y, scale,
            scale if shift is None else shift, mean, inverse, width, eps,
            ADD=ctx.add, CENTRED=ctx.centred, BLOCK=ctx.block, num_warps=_warps(ctx.block),
        )  # fmt: skip
        ctx.save_for_backward(total, scale, mean, inverse)
        return total if ctx.add else None, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, mean, inverse = ctx.saved_tensors
        rows, width = total.shape
        programs = min(rows, _MOST_PROGRAMS)
        grad_x = torch.empty_like(total)
        grad_y = grad_y.contiguous()
        grad_sum = grad_y if grad_total is None else grad_total.contiguous()
        part_scale = torch.empty((programs, width), dtype=torch.float32, device=total.device)
        part_shift = torch.empty_like(part_scale) if ctx.centred else part_scale
        _norm_backward_kernel[(programs,)](
            total, scale, mean, inverse, grad_y, grad_sum, grad_x, part_scale, part_shift, rows, width,
            ADD=grad_total is not None, CENTRED=ctx.centred, BLOCK=ctx.block, num_warps=_warps(ctx.block),
        )  # fmt: skip
        grad_shift = part_shift.sum(0).to(scale.dtype) if ctx.centred else None
        return grad_x, grad_x if ctx.add else None, part_scale.sum(0).to(scale.dtype), grad_shift, None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
