"""Rotary positions, on separate heads or in place on the packed Q, K and V of the projection.

Legend: T tokens, N heads, H a head's width, R rotary pairs, W = (queries + 2 · keys) · H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _rotary_kernel(x, x_token, x_head, y, y_token, y_head, cos, sin, sign, heads, pairs, width,
          COPY: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < heads) & (pair < pairs)
    source, target = x + token * x_token + head * x_head, y + token * y_token + head * y_head
    first = tl.load(source + pair, inside, 0.0)
    second = tl.load(source + pairs + pair, inside, 0.0).to(tl.float32)
    # cosine and sine rounded to the dtype of the heads, like the reference
    c = tl.load(cos + token * pairs + pair, pair < pairs, 0.0).to(first.dtype).to(tl.float32)
    s = sign * tl.load(sin + token * pairs + pair, pair < pairs, 0.0).to(first.dtype).to(tl.float32)
    a = first.to(tl.float32)
    tl.store(target + pair, (a * c - second * s).to(first.dtype), inside)
    tl.store(target + pairs + pair, (second * c + a * s).to(first.dtype), inside)
    if COPY:
        column = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (column < width)
        tl.store(target + column, tl.load(source + column, inside, 0.0), inside)


def _launch_rotary(x_TNH: Tensor, y_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: float) -> Tensor:
    """Rotate x by the angles into y, or back with sign -1; both may be views, and may be the same memory."""
    tokens, heads, width = x_TNH.shape
    assert x_TNH.stride(2) == y_TNH.stride(2) == 1
    pairs = cos_TR.shape[1]
    head_block = min(triton.next_power_of_2(heads), 16)
    rest = width - 2 * pairs
    _rotary_kernel[(tokens, triton.cdiv(heads, head_block))](
        x_TNH, x_TNH.stride(0), x_TNH.stride(1), y_TNH, y_TNH.stride(0), y_TNH.stride(1),
        cos_TR.contiguous(), sin_TR.contiguous(), sign, heads, pairs, width,
        COPY=rest > 0 and x_TNH.data_ptr() != y_TNH.data_ptr(),
        HEADS=head_block, PAIRS=triton.next_power_of_2(pairs), REST=triton.next_power_of_2(max(rest, 1)),
    )  # fmt: skip
    return y_TNH


def apply_rotary(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Apply rotary positions to heads, as `reference.apply_rotary`."""
    y: Tensor = _Rotary.apply(x_TNH, cos_TR, sin_TR)
    return y


def apply_rotary_packed(
    qkv_TW: Tensor, widths: Sequence[int], head: int, cos_TR: Tensor, sin_TR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply rotary positions to packed Q and K in place, as `reference.apply_rotary_packed`."""
    qkv: tuple[Tensor, Tensor, Tensor] = _RotaryPacked.apply(qkv_TW, tuple(widths), head, cos_TR, sin_TR)
    return qkv


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        x = x if x.stride(2) == 1 else x.contiguous()
        return _launch_rotary(x, x.new_empty(x.shape), cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad if grad.stride(2) == 1 else grad.contiguous()
        cos, sin = ctx.saved_tensors
        return _launch_rotary(grad, grad.new_empty(grad.shape), cos, sin, -1.0), None, None


class _RotaryPacked(torch.autograd.Function):
    """Backward packs the three gradients while it rotates two of them."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, widths: tuple[int, int, int], head: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.widths = widths
        ctx.head = head
        qkv = qkv.contiguous()
        queries_and_keys = qkv[:, : widths[0] + widths[1]].unflatten(1, (-1, head))
        _launch_rotary(queries_and_keys, queries_and_keys, cos, sin, 1.0)
        q, k, v = (part.unflatten(1, (-1, head)) for part in qkv.split(widths, 1))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        packed = grads[0].new_empty((grads[0].shape[0], sum(ctx.widths)))
        q, k, v = (part.unflatten(1, (-1, ctx.head)) for part in packed.split(ctx.widths, 1))
        for grad, target in zip(grads, (q, k), strict=False):
            grad = grad if grad.stride(2) == 1 else grad.contiguous()
            _launch_rotary(grad, target, cos, sin, -1.0)
        v.copy_(grads[2])
        return packed, None, None, None, None
