"""Elementwise kernels between the products of a feed-forward: bias and GELU, and SwiGLU.

Legend: T tokens, F this rank's width, P programs per strip of columns.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024
_MOST_ROWS = 64  # programs that share the rows of one strip of columns


@triton.jit
def _gelu_parts(u, TANH: tl.constexpr):
    """Return Φ(u) and its derivative, by erf or by the tanh approximation of arXiv:1606.08415."""
    if TANH:
        inner = 0.7978845608028654 * (u + 0.044715 * u * u * u)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        cdf = 0.5 * (1 + tanh)
        slope = 0.5 * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 3 * 0.044715 * u * u)
    else:
        cdf = 0.5 * (1 + tl.erf(u * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * u * u)
    return cdf, slope


@triton.jit
def _bias_gelu_kernel(
    x, bias, y, rows, width, HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        offset = tl.cast(row, tl.int64) * width + column
        loaded = tl.load(x + offset, inside, 0.0)
        u = loaded.to(tl.float32)
        if HAS_BIAS:
            u = (u + tl.load(bias + column, inside, 0.0).to(tl.float32)).to(loaded.dtype).to(tl.float32)
        cdf, _ = _gelu_parts(u, TANH)
        tl.store(y + offset, (u * cdf).to(loaded.dtype), inside)


@triton.jit
def _bias_gelu_backward_kernel(x, bias, grad_y, grad_x, part_bias, rows, width,
                    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        offset = tl.cast(row, tl.int64) * width + column
        loaded = tl.load(x + offset, inside, 0.0)
        u = loaded.to(tl.float32)
        if HAS_BIAS:
            u = (u + tl.load(bias + column, inside, 0.0).to(tl.float32)).to(loaded.dtype).to(tl.float32)
        cdf, slope = _gelu_parts(u, TANH)
        grad = tl.load(grad_y + offset, inside, 0.0).to(tl.float32) * (cdf + u * slope)
        total += grad
        tl.store(grad_x + offset, grad.to(loaded.dtype), inside)
    if HAS_BIAS:
        tl.store(part_bias + tl.program_id(1) * width + column, total, inside)


@triton.jit
def _swiglu_kernel(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    loaded = tl.load(x + 2 * row * width + column, inside, 0.0)
    gate = loaded.to(tl.float32)
    up = tl.load(x + (2 * row + 1) * width + column, inside, 0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(loaded.dtype).to(tl.float32)  # rounded like the reference
    tl.store(y + row * width + column, (silu * up).to(loaded.dtype), inside)


@triton.jit
def _swiglu_backward_kernel(x, grad_y, grad_x, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    loaded = tl.load(x + 2 * row * width + column, inside, 0.0)
    gate = loaded.to(tl.float32)
    up = tl.load(x + (2 * row + 1) * width + column, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_y + row * width + column, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_x + 2 * row * width + column, grad_gate.to(loaded.dtype), inside)
    tl.store(grad_x + (2 * row + 1) * width + column, (grad * gate * sigmoid).to(loaded.dtype), inside)


def bias_gelu(x_TF: Tensor, bias_F: Tensor | None, approximate: Literal["none", "tanh"]) -> Tensor:
    """Add the bias and apply GELU, as `reference.bias_gelu`."""
    y: Tensor = _BiasGelu.apply(x_TF, bias_F, approximate == "tanh")
    return y


def swiglu(x_TF: Tensor) -> Tensor:
    """Compute silu(gate) · up, as `reference.swiglu`."""
    y: Tensor = _SwiGLU.apply(x_TF)
    return y


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        ctx.grid = (triton.cdiv(x.shape[1], _BLOCK), min(x.shape[0], _MOST_ROWS))
        y = torch.empty_like(x)
        _bias_gelu_kernel[ctx.grid](
            x, x if bias is None else bias, y, *x.shape, HAS_BIAS=bias is not None, TANH=tanh, BLOCK=_BLOCK
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        part = grad_x if bias is None else x.new_empty((ctx.grid[1], x.shape[1]), dtype=torch.float32)
        _bias_gelu_backward_kernel[ctx.grid](
            x, x if bias is None else bias, grad_y.contiguous(), grad_x, part, *x.shape,
            HAS_BIAS=bias is not None, TANH=ctx.tanh, BLOCK=_BLOCK,
        )  # fmt: skip
        return grad_x, None if bias is None else part.sum(0).to(bias.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        rows = x.shape[0]
        width = x.shape[1] // 2
        y = x.new_empty((rows, width))
        _swiglu_kernel[(rows, triton.cdiv(width, _BLOCK))](x, y, width, BLOCK=_BLOCK)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        width = x.shape[1] // 2
        grid = (x.shape[0], triton.cdiv(width, _BLOCK))
        _swiglu_backward_kernel[grid](x, grad_y.contiguous(), grad_x, width, BLOCK=_BLOCK)
        return grad_x
