"""Dropout and the residual addition in one kernel.

The mask is that of `mega_model.dropout`: a hash of the element.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024


@triton.jit
def _dropout_add_kernel(x, residual, key, y, width, least, factor, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Compute an element's half word of `mega_model.dropout._uniform_int16`, in unsigned 32-bit numbers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    low = tl.load(key + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(key + 2 * row + 1).to(tl.uint32, bitcast=True)
    word = ((column // 2).to(tl.uint32) * 0x9E3779B9) ^ low
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = ((word ^ (word >> 15)) + high) * 0xD35A2D97
    word = word ^ (word >> 16)
    half = tl.where(column % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)
    half = tl.where(half >= 32768, half - 65536, half)
    loaded = tl.load(x + row * width + column, inside, 0.0)
    value = tl.where(half >= least, (loaded.to(tl.float32) * factor).to(loaded.dtype).to(tl.float32), 0.0)
    if ADD:
        value += tl.load(residual + row * width + column, inside, 0.0).to(tl.float32)
    tl.store(y + row * width + column, value.to(loaded.dtype), inside)


def _launch(x: Tensor, residual: Tensor | None, key_T: Tensor, probability: float) -> Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    rows = key_T.numel()
    width = x.shape[-1]
    steps = min(round(probability * 65536), 65535)
    _dropout_add_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x, x if residual is None else residual.contiguous(), key_T.contiguous().view(torch.int32), y,
        width, steps - 32768, 65536 / (65536 - steps), ADD=residual is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return y


def dropout_add(x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
    """Drop elements of x and add the residual, as `mega_model.dropout.dropout_add`."""
    y: Tensor = _DropoutAdd.apply(x, residual, key, probability)
    return y


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(key)
        ctx.probability = probability
        ctx.add = residual is not None
        return _launch(x, residual, key, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return _launch(grad, None, key, ctx.probability), grad if ctx.add else None, None, None
