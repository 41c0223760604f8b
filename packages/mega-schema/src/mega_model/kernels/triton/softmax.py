"""Softmax of attention scores with a mask, and the cross-entropy of a vocabulary split over tp.

Legend: B samples, N heads, s queries, S keys; C tokens, V this rank's columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mega_model.distributed.mesh import Axis
from mega_model.kernels.reference import IGNORED

_COLUMNS = 4096  # of the vocabulary, per step of a program


@triton.jit
def _softmax_kernel(score, mask, y, scale, heads, queries, keys, mask_sample, mask_head, mask_query,
             MASK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < keys
    loaded = tl.load(score + row * keys + column, inside, float("-inf"))
    value = loaded.to(tl.float32) * scale
    if MASK != 0:
        sample = row // (heads * queries)
        head = row // queries % heads
        query = row % queries
        pointer = mask + sample * mask_sample + head * mask_head + query * mask_query + column
        if MASK == 1:
            value = tl.where(tl.load(pointer, inside, 0) != 0, value, float("-inf"))
        else:
            value += tl.load(pointer, inside, 0.0).to(tl.float32)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * keys + column, (value / tl.sum(value, 0)).to(loaded.dtype), inside)


@triton.jit
def _softmax_backward_kernel(y, grad_y, grad_x, scale, keys, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < keys
    loaded = tl.load(y + row * keys + column, inside, 0.0)
    probability = loaded.to(tl.float32)
    grad = tl.load(grad_y + row * keys + column, inside, 0.0).to(tl.float32)
    grad_score = scale * probability * (grad - tl.sum(grad * probability, 0))
    tl.store(grad_x + row * keys + column, grad_score.to(loaded.dtype), inside)


@triton.jit
def _log_sum_kernel(logits, stride, target, log_sum, at_target, columns, BLOCK: tl.constexpr):
    """Compute log Σ exp(z) of a row in one pass (arXiv:1805.02867), and z at the target."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + column, column < columns, float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger), 0)
        largest = larger
    tl.store(log_sum + row, largest + tl.log(total))
    wanted = tl.load(target + row)
    z = tl.load(logits + row * stride + wanted, wanted >= 0, 0.0).to(tl.float32)
    tl.store(at_target + row, z)


@triton.jit
def _gradient_kernel(
    logits, stride, target, log_sum, scale, columns, IGNORE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted, row_log_sum = tl.load(target + row), tl.load(log_sum + row)
    pointer = logits + row * stride + column
    loaded = tl.load(pointer, column < columns, 0.0)
    grad_logit = tl.exp(loaded.to(tl.float32) - row_log_sum) - tl.where(column == wanted, 1.0, 0.0)
    grad_logit = tl.where(wanted == IGNORE, 0.0, grad_logit * scale)
    tl.store(pointer, grad_logit.to(loaded.dtype), column < columns)


def masked_softmax(score_BNsS: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute the softmax of scores with a mask, as `reference.masked_softmax`."""
    y: Tensor = _MaskedSoftmax.apply(score_BNsS, mask, scale)
    return y


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        score = score.contiguous()
        samples, heads, queries, keys = score.shape
        y = torch.empty_like(score)
        ctx.block = triton.next_power_of_2(keys)
        ctx.scale = scale
        whole = score if mask is None else mask.expand(score.shape)
        whole = whole if whole.stride(3) == 1 else whole.contiguous()
        kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
        _softmax_kernel[(samples * heads * queries,)](
            score, whole, y, scale, heads, queries, keys, *whole.stride()[:3], MASK=kind, BLOCK=ctx.block
        )
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        grad_x = torch.empty_like(y)
        keys = y.shape[-1]
        _softmax_backward_kernel[(y.numel() // keys,)](
            y, grad.contiguous(), grad_x, ctx.scale, keys, BLOCK=ctx.block
        )
        return grad_x, None, None


def cross_entropy(logits_CV: Tensor, target_C: Tensor, tp: Axis, scale: float | None) -> Tensor:
    """Compute the cross-entropy, as `reference.cross_entropy`, in two reads and one write of the logits."""
    tokens, columns = logits_CV.shape
    stride = logits_CV.stride(0)
    local_C = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=logits_CV.device)
    at_target_C = torch.zeros_like(local_C)
    if columns:  # a rank may hold nothing but padding
        _log_sum_kernel[(tokens,)](logits_CV, stride, target_C, local_C, at_target_C, columns, BLOCK=_COLUMNS)
    log_sum_C = local_C
    if tp.size > 1:
        largest_C = tp.reduce(local_C.clone(), "max")
        sum_C, at_target_C = tp.reduce(torch.stack(((local_C - largest_C).exp(), at_target_C)))
        log_sum_C = largest_C + sum_C.log()
    if scale is not None and columns:
        grid = (tokens, triton.cdiv(columns, _COLUMNS))
        _gradient_kernel[grid](
            logits_CV, stride, target_C, log_sum_C, scale, columns, IGNORE=IGNORED, BLOCK=_COLUMNS
        )
    return torch.where(target_C != IGNORED, log_sum_C - at_target_C, 0.0)
