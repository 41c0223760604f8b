"""Blockwise attention for a CPU, as in flash-attention (arXiv:2307.08691).

The scores of a block of queries stay in the processor's cache; keys after the block are skipped. Scores,
softmax and sums are float32; factors of products are bfloat16 if the CPU multiplies it natively, else
float32. Backward recomputes the probabilities from q, k and v. bench/cpu_attention.py compares it with
torch's own, which computes in float32.

Legend: B rows; N query heads, K key heads, E query heads per key head; G key heads at a time; s queries of a
row, S keys; R query rows of a block, E heads together; C keys a block sees; H width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mega_model.kernels.interface import Visible
from mega_model.kernels.reference import attention as definition
from mega_model.kernels.relative_bias import expand_bias, reduce_bias_gradient
from mega_model.matmul_precision import allow_bf16_matmul, has_native

_BLOCK_ROWS = 128  # R
_BLOCK_SCORES = 1 << 20  # per block: 4 MiB
_MAX_WIDTHS = 32  # different values of C: oneDNN compiles a product for each, and caches a thousand


def attention(q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible) -> Tensor:
    """Compute attention, as `reference.attention`, which handles masks, single queries and other dtypes."""
    is_supported = q_BNsH.dtype in (torch.bfloat16, torch.float32)
    if isinstance(visible, Tensor) or not is_supported or q_BNsH.shape[2] == 1:
        return definition(q_BNsH, k_BKSH, v_BKSH, visible)
    out: Tensor = _Attention.apply(q_BNsH, k_BKSH, v_BKSH, visible == "before", q_BNsH.dtype)
    return out


def attention_in_float32(q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible) -> Tensor:
    """Compute `attention` with all products in float32, for a CPU without half-precision instructions.

    The factors of one block are converted at a time; nothing is saved in float32.
    """
    if isinstance(visible, Tensor) or q_BNsH.dtype == torch.float64 or q_BNsH.shape[2] == 1:
        return definition(q_BNsH, k_BKSH, v_BKSH, visible)
    out: Tensor = _Attention.apply(q_BNsH, k_BKSH, v_BKSH, visible == "before", torch.float32)
    return out


def relative_attention(
    q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible, bias_ND: Tensor
) -> Tensor:
    """Compute attention with a learned bias, as `relative_bias.relative_attention`, blockwise on a CPU."""
    is_visible = visible if isinstance(visible, Tensor) else None
    dtype = q_BNsH.dtype if q_BNsH.dtype == torch.bfloat16 and has_native(torch.bfloat16) else torch.float32
    inputs = q_BNsH, k_BKSH, v_BKSH, visible == "before" if is_visible is None else False, dtype
    out: Tensor = _Attention.apply(*inputs, bias_ND, is_visible)
    return out


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries `begin` to `end`; the first of them sees `seen` keys, the last at most `keys`."""

    begin: int
    end: int
    visible_keys: int
    keys: int


def _blocks(queries: int, keys: int, group_size: int, causal: bool) -> Iterator[_Block]:
    step = max(1, _BLOCK_ROWS // group_size)
    unit = step * -(-keys // (step * _MAX_WIDTHS))
    for begin in range(0, queries, step):
        end = min(begin + step, queries)
        if causal:
            last = end + keys - queries
            yield _Block(begin, end, last - (end - begin) + 1, min(keys, -(-last // unit) * unit))
        else:
            yield _Block(begin, end, keys, keys)


class _HeadGroup:
    """Some key heads of one row, their queries, and the buffers in which their blocks are computed."""

    def __init__(
        self,
        q_NsH: Tensor,
        k_GSH: Tensor,
        causal: bool,
        dtype: torch.dtype,
        bias_NsS: Tensor | None,
        is_visible_sS: Tensor | None,
    ) -> None:
        heads, keys, width = k_GSH.shape
        self.bias_GEsS = None if bias_NsS is None else bias_NsS.unflatten(0, (heads, -1))
        self.is_hidden_sS = None if is_visible_sS is None else ~is_visible_sS
        self.scale = width**-0.5
        self.q_GEsH = _to_dense(q_NsH, torch.float32).unflatten(0, (heads, -1))
        self.k_GSH = _to_dense(k_GSH, torch.float32)
        self.group_size, queries = self.q_GEsH.shape[1:3]
        self.blocks = list(_blocks(queries, keys, self.group_size, causal))
        step = self.blocks[0].end
        hidden = max(block.keys - block.visible_keys for block in self.blocks)
        buffer_size = heads * self.group_size * step * keys
        mask_shape = (step, hidden)
        self._future_mask = torch.full(
            mask_shape, -torch.inf
        ).triu()  # hides the last keys from earlier queries
        self.buffer = q_NsH.new_empty(buffer_size, dtype=torch.float32)
        self._matmul_buffer = None if dtype == torch.float32 else q_NsH.new_empty(buffer_size, dtype=dtype)

    def rows(self, x_GEsH: Tensor, block: _Block) -> Tensor:
        """Return the block's query rows, (G, R, H) or of another last dimension."""
        return x_GEsH[:, :, block.begin : block.end].flatten(1, 2)

    def probabilities(self, block: _Block) -> Tensor:
        """Return the softmax of the block's scores, (G, R, C) float32; valid until the next call."""
        q_GRH = self.rows(self.q_GEsH, block)
        k_GCH = self.k_GSH[:, : block.keys].contiguous()
        shape = (*q_GRH.shape[:2], block.keys)
        p_GRC = self.buffer[: prod(shape)].view(shape)
        if self.bias_GEsS is None:
            torch.baddbmm(p_GRC, q_GRH, k_GCH.mT, beta=0, alpha=self.scale, out=p_GRC)
        else:
            bias_GRC = self.rows(self.bias_GEsS, block)[..., : block.keys]
            torch.baddbmm(bias_GRC, q_GRH, k_GCH.mT, alpha=self.scale, out=p_GRC)
        if self.is_hidden_sS is not None:
            hidden = self.is_hidden_sS[block.begin : block.end, : block.keys]
            p_GRC.unflatten(1, (self.group_size, -1)).masked_fill_(hidden, -torch.inf)
        if block.visible_keys < block.keys:
            mask = self._future_mask[: block.end - block.begin, : block.keys - block.visible_keys]
            p_GRC.unflatten(1, (self.group_size, -1))[..., block.visible_keys :].add_(mask)
        return torch.softmax(p_GRC, 2, out=p_GRC)

    def to_matmul_dtype(self, x_GRC: Tensor) -> Tensor:
        """Return x in the dtype of the products.

        For half precision, a copy that is valid until the next call.
        """
        return x_GRC if self._matmul_buffer is None else _view_in(self._matmul_buffer, x_GRC).copy_(x_GRC)

    def put_rows(self, into_GEsH: Tensor, block: _Block, rows_GRH: Tensor) -> None:
        """Write a block's result to its queries' rows."""
        into_GEsH[:, :, block.begin : block.end] = rows_GRH.unflatten(1, (self.group_size, -1))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNsH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        causal: bool,
        dtype: torch.dtype,
        bias_ND: Tensor | None = None,
        is_visible_B1sS: Tensor | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            dtype: dtype of the products' factors.
            bias_ND: as in `relative_bias.relative_attention`.
            is_visible_B1sS: the keys that a query sees, at least one; (1, 1, s, S) for all rows.
        """
        ctx.save_for_backward(q_BNsH, k_BKSH, v_BKSH, bias_ND, is_visible_B1sS)
        ctx.causal = causal
        ctx.dtype = dtype
        out_BNsH = token_major(q_BNsH)
        bias_NsS = None if bias_ND is None else expand_bias(bias_ND, q_BNsH.shape[2], k_BKSH.shape[2])
        inputs = q_BNsH, k_BKSH, v_BKSH, out_BNsH, _repeat(bias_NsS, len(q_BNsH))
        with allow_bf16_matmul(dtype):
            for row, tensors in _head_groups(k_BKSH, *inputs):
                _forward_heads(causal, dtype, _row_of(is_visible_B1sS, row), *tensors)
        return out_BNsH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNsH: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, bias_ND, is_visible_B1sS = ctx.saved_tensors
        grads = [token_major(x) for x in inputs]
        rows = len(grad_BNsH)
        bias_NsS = grad_bias_NsS = None
        if bias_ND is not None:
            bias_NsS = expand_bias(bias_ND, grad_BNsH.shape[2], inputs[1].shape[2])
            grad_bias_NsS = torch.zeros_like(bias_NsS)
        biases = _repeat(bias_NsS, rows), _repeat(grad_bias_NsS, rows)
        with allow_bf16_matmul(ctx.dtype):
            for row, tensors in _head_groups(inputs[1], *inputs, grad_BNsH, *grads, *biases):
                _backward_heads(ctx.causal, ctx.dtype, _row_of(is_visible_B1sS, row), *tensors)
        grad_bias_ND = None
        if bias_ND is not None and grad_bias_NsS is not None:
            grad_bias_ND = reduce_bias_gradient(grad_bias_NsS, bias_ND.shape[1])
        return *grads, None, None, grad_bias_ND, None


def _repeat(bias_NsS: Tensor | None, rows: int) -> Tensor | None:
    """Return a view of the bias for each row."""
    return None if bias_NsS is None else bias_NsS.expand(rows, -1, -1, -1)


def _row_of(is_visible_B1sS: Tensor | None, row: int) -> Tensor | None:
    if is_visible_B1sS is None:
        return None
    return is_visible_B1sS[row if len(is_visible_B1sS) > 1 else 0, 0]


def _forward_heads(
    causal: bool,
    dtype: torch.dtype,
    is_visible_sS: Tensor | None,
    q_NsH: Tensor,
    k_GSH: Tensor,
    v_GSH: Tensor,
    out_NsH: Tensor,
    bias_NsS: Tensor | None,
) -> None:
    heads = _HeadGroup(q_NsH, k_GSH, causal, dtype, bias_NsS, is_visible_sS)
    v_GSH = _to_dense(v_GSH, dtype)
    out_GEsH = out_NsH.unflatten(0, (len(k_GSH), -1))
    for block in heads.blocks:
        p_GRC = heads.to_matmul_dtype(heads.probabilities(block))
        heads.put_rows(out_GEsH, block, p_GRC @ v_GSH[:, : block.keys])


def _backward_heads(
    causal: bool,
    dtype: torch.dtype,
    is_visible_sS: Tensor | None,
    q_NsH: Tensor,
    k_GSH: Tensor,
    v_GSH: Tensor,
    grad_NsH: Tensor,
    grad_q_NsH: Tensor,
    grad_k_GSH: Tensor,
    grad_v_GSH: Tensor,
    bias_NsS: Tensor | None,
    grad_bias_NsS: Tensor | None,
) -> None:
    """Compute the gradients of some heads.

    For p = softmax(score), the gradient of the score is p (grad_p - Σ p grad_p), summed over the keys.
    """
    heads = _HeadGroup(q_NsH, k_GSH, causal, dtype, bias_NsS, is_visible_sS)
    groups = (len(k_GSH), -1)
    if dtype == torch.float32:
        q_GEsH, k_GSH = heads.q_GEsH, heads.k_GSH
    else:
        q_GEsH, k_GSH = _to_dense(q_NsH, dtype).unflatten(0, groups), _to_dense(k_GSH, dtype)
    v_GSH = _to_dense(v_GSH, torch.float32)
    grad_q_GEsH = grad_q_NsH.unflatten(0, groups)
    grad_GEsH = _to_dense(grad_NsH, dtype).unflatten(0, groups)
    sum_k_GSH, sum_v_GSH = torch.zeros_like(v_GSH), torch.zeros_like(v_GSH)
    buffer = torch.empty_like(heads.buffer)
    for block in heads.blocks:
        p_GRC = heads.probabilities(block)
        grad_GRH = heads.rows(grad_GEsH, block)
        visible = slice(block.keys)
        grad_p_GRC = _view_in(buffer, p_GRC)
        torch.bmm(grad_GRH.float(), v_GSH[:, visible].contiguous().mT, out=grad_p_GRC)
        _add_product(sum_v_GSH[:, visible], heads.to_matmul_dtype(p_GRC).mT, grad_GRH)
        torch.ops.aten._softmax_backward_data.out(grad_p_GRC, p_GRC, 2, torch.float32, grad_input=grad_p_GRC)
        if grad_bias_NsS is not None:
            grad_bias_GEsS = grad_bias_NsS.unflatten(0, groups)[:, :, block.begin : block.end, visible]
            grad_bias_GEsS += grad_p_GRC.unflatten(1, (heads.group_size, -1))
        grad_score_GRC = heads.to_matmul_dtype(grad_p_GRC)
        _add_product(sum_k_GSH[:, visible], grad_score_GRC.mT, heads.rows(q_GEsH, block))
        grad_q_GRH = torch.empty_like(grad_GRH)
        torch.baddbmm(
            grad_q_GRH, grad_score_GRC, k_GSH[:, visible], beta=0, alpha=heads.scale, out=grad_q_GRH
        )
        heads.put_rows(grad_q_GEsH, block, grad_q_GRH)
    grad_k_GSH.copy_(sum_k_GSH.mul_(heads.scale))
    grad_v_GSH.copy_(sum_v_GSH)


def _head_groups(
    k_BKSH: Tensor, *tensors: Tensor | None
) -> Iterator[tuple[int, list[Any]]]:  # Any: a tensor, or None as in `tensors`
    """Yield, for each row, groups of key heads that fit one block, with their part of every tensor."""
    rows, heads, keys, _ = k_BKSH.shape
    group_heads = max(1, _BLOCK_SCORES // (_BLOCK_ROWS * keys))
    for row in range(rows):
        for begin in range(0, heads, group_heads):
            part = slice(begin, begin + group_heads)
            yield (
                row,
                [
                    None if x is None else x[row].unflatten(0, (heads, -1))[part].flatten(0, 1)
                    for x in tensors
                ],
            )


def _add_product(sum_GSH: Tensor, a_GCR: Tensor, b_GRH: Tensor) -> None:
    """Compute sum += a b with a float32 sum; a bfloat16 product is rounded before it is added."""
    if a_GCR.dtype == torch.float32:
        sum_GSH.baddbmm_(a_GCR, b_GRH)
    else:
        sum_GSH += a_GCR @ b_GRH


def token_major(x_BNsH: Tensor) -> Tensor:
    """Return an uninitialised tensor of x's shape in which the heads of a token are contiguous."""
    return x_BNsH.new_empty(x_BNsH.transpose(1, 2).shape).transpose(1, 2)


def _to_dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype).copy_(x)


def _view_in(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.numel()].view(like.shape)
