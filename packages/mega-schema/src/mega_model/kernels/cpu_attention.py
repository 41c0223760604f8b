"""Blockwise attention for a CPU, as in flash-attention (arXiv:2307.08691).

The scores of a block of queries stay in the processor's cache; keys after the block are skipped. Short rows
share a block. Scores, softmax and sums are float32; factors of products are bfloat16 if the CPU multiplies it
natively, else float32. Backward recomputes the probabilities from q, k and v. bench/cpu_attention.py compares
it with torch's own, which computes in float32.

Legend: B rows, b of them at a time; N query heads, K key heads, E query heads per key head; F key heads of a
row at a time, G = b F; s queries of a row, S keys; R query rows of a block, E heads together; C keys a block
sees; H width of a head.
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
    """Some key heads of some rows, their queries, and the buffers in which their blocks are computed."""

    def __init__(
        self,
        q_bFEsH: Tensor,
        k_bF1SH: Tensor,
        causal: bool,
        dtype: torch.dtype,
        bias_FEsS: Tensor | None,
        is_visible_bsS: Tensor | None,
    ) -> None:
        self.bias_FEsS = bias_FEsS
        self.is_hidden_b11sS = None if is_visible_bsS is None else ~is_visible_bsS[:, None, None]
        self.scale = k_bF1SH.shape[-1] ** -0.5
        self.q_GEsH = _to_dense(q_bFEsH, torch.float32).flatten(0, 1)
        self.k_GSH = _to_dense(k_bF1SH, torch.float32).flatten(0, 2)
        self.rows_and_heads = q_bFEsH.shape[:3]
        heads, self.group_size, queries = self.q_GEsH.shape[:3]
        keys = self.k_GSH.shape[1]
        self.blocks = list(_blocks(queries, keys, self.group_size, causal))
        step = self.blocks[0].end
        hidden = max(block.keys - block.visible_keys for block in self.blocks)
        buffer_size = heads * self.group_size * step * keys
        # hides the last keys from earlier queries
        self._future_mask = torch.full((step, hidden), -torch.inf).triu()
        self.buffer = q_bFEsH.new_empty(buffer_size, dtype=torch.float32)
        self._matmul_buffer = None if dtype == torch.float32 else q_bFEsH.new_empty(buffer_size, dtype=dtype)

    def rows(self, x_GEsH: Tensor, block: _Block) -> Tensor:
        """Return the block's query rows, (G, R, H) or of another last dimension."""
        return x_GEsH[:, :, block.begin : block.end].flatten(1, 2)

    def split_rows(self, x_GRC: Tensor) -> Tensor:
        """Return a view of a block's rows as (b, F, E, queries, C), or of another last dimension."""
        return x_GRC.view(*self.rows_and_heads, -1, x_GRC.shape[-1])

    def probabilities(self, block: _Block) -> Tensor:
        """Return the softmax of the block's scores, (G, R, C) float32; valid until the next call."""
        q_GRH = self.rows(self.q_GEsH, block)
        k_GCH = self.k_GSH[:, : block.keys].contiguous()
        shape = (*q_GRH.shape[:2], block.keys)
        p_GRC = self.buffer[: prod(shape)].view(shape)
        beta = 0
        if self.bias_FEsS is not None:
            self.split_rows(p_GRC).copy_(self.bias_FEsS[:, :, block.begin : block.end, : block.keys])
            beta = 1
        torch.baddbmm(p_GRC, q_GRH, k_GCH.mT, beta=beta, alpha=self.scale, out=p_GRC)
        if self.is_hidden_b11sS is not None:
            is_hidden = self.is_hidden_b11sS[..., block.begin : block.end, : block.keys]
            self.split_rows(p_GRC).masked_fill_(is_hidden, -torch.inf)
        if block.visible_keys < block.keys:
            mask = self._future_mask[: block.end - block.begin, : block.keys - block.visible_keys]
            p_GRC.unflatten(1, (self.group_size, -1))[..., block.visible_keys :].add_(mask)
        return torch.softmax(p_GRC, 2, out=p_GRC)

    def to_matmul_dtype(self, x_GRC: Tensor) -> Tensor:
        """Return x in the dtype of the products.

        For half precision, a copy that is valid until the next call.
        """
        return x_GRC if self._matmul_buffer is None else _view_in(self._matmul_buffer, x_GRC).copy_(x_GRC)

    def put_rows(self, into_bFEsH: Tensor, block: _Block, rows_GRH: Tensor) -> None:
        """Write a block's result to its queries' rows."""
        into_bFEsH[..., block.begin : block.end, :] = self.split_rows(rows_GRH)


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
        tensors = q_BNsH, k_BKSH, v_BKSH, out_BNsH
        with allow_bf16_matmul(dtype):
            for group in _head_groups(q_BNsH, k_BKSH):
                bias_FEsS, is_visible_bsS = group.heads_of(bias_NsS), group.rows_of(is_visible_B1sS)
                _forward_heads(causal, dtype, is_visible_bsS, bias_FEsS, *map(group.part_of, tensors))
        return out_BNsH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNsH: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, bias_ND, is_visible_B1sS = ctx.saved_tensors
        grads = [token_major(x) for x in inputs]
        bias_NsS = grad_bias_NsS = None
        if bias_ND is not None:
            bias_NsS = expand_bias(bias_ND, grad_BNsH.shape[2], inputs[1].shape[2])
            grad_bias_NsS = torch.zeros_like(bias_NsS)
        tensors = *inputs, grad_BNsH, *grads
        with allow_bf16_matmul(ctx.dtype):
            for group in _head_groups(*inputs[:2]):
                is_visible_bsS = group.rows_of(is_visible_B1sS)
                biases = group.heads_of(bias_NsS), group.heads_of(grad_bias_NsS)
                parts = map(group.part_of, tensors)
                _backward_heads(ctx.causal, ctx.dtype, is_visible_bsS, *biases, *parts)
        grad_bias_ND = None
        if bias_ND is not None and grad_bias_NsS is not None:
            grad_bias_ND = reduce_bias_gradient(grad_bias_NsS, bias_ND.shape[1])
        return *grads, None, None, grad_bias_ND, None


def _forward_heads(
    causal: bool,
    dtype: torch.dtype,
    is_visible_bsS: Tensor | None,
    bias_FEsS: Tensor | None,
    q_bFEsH: Tensor,
    k_bF1SH: Tensor,
    v_bF1SH: Tensor,
    out_bFEsH: Tensor,
) -> None:
    heads = _HeadGroup(q_bFEsH, k_bF1SH, causal, dtype, bias_FEsS, is_visible_bsS)
    v_GSH = _to_dense(v_bF1SH, dtype).flatten(0, 2)
    for block in heads.blocks:
        p_GRC = heads.to_matmul_dtype(heads.probabilities(block))
        heads.put_rows(out_bFEsH, block, p_GRC @ v_GSH[:, : block.keys])


def _backward_heads(
    causal: bool,
    dtype: torch.dtype,
    is_visible_bsS: Tensor | None,
    bias_FEsS: Tensor | None,
    grad_bias_FEsS: Tensor | None,
    q_bFEsH: Tensor,
    k_bF1SH: Tensor,
    v_bF1SH: Tensor,
    grad_bFEsH: Tensor,
    grad_q_bFEsH: Tensor,
    grad_k_bF1SH: Tensor,
    grad_v_bF1SH: Tensor,
) -> None:
    """Compute the gradients of some heads.

    For p = softmax(score), the gradient of the score is p (grad_p - Σ p grad_p), summed over the keys.
    """
    heads = _HeadGroup(q_bFEsH, k_bF1SH, causal, dtype, bias_FEsS, is_visible_bsS)
    if dtype == torch.float32:
        q_GEsH, k_GSH = heads.q_GEsH, heads.k_GSH
    else:
        q_GEsH = _to_dense(q_bFEsH, dtype).flatten(0, 1)
        k_GSH = _to_dense(k_bF1SH, dtype).flatten(0, 2)
    v_GSH = _to_dense(v_bF1SH, torch.float32).flatten(0, 2)
    grad_GEsH = _to_dense(grad_bFEsH, dtype).flatten(0, 1)
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
        if grad_bias_FEsS is not None:
            grad_bias_FEsS[:, :, block.begin : block.end, visible] += heads.split_rows(grad_p_GRC).sum(0)
        grad_score_GRC = heads.to_matmul_dtype(grad_p_GRC)
        _add_product(sum_k_GSH[:, visible], grad_score_GRC.mT, heads.rows(q_GEsH, block))
        grad_q_GRH = torch.empty_like(grad_GRH)
        torch.baddbmm(
            grad_q_GRH, grad_score_GRC, k_GSH[:, visible], beta=0, alpha=heads.scale, out=grad_q_GRH
        )
        heads.put_rows(grad_q_bFEsH, block, grad_q_GRH)
    grad_k_bF1SH.copy_(sum_k_GSH.mul_(heads.scale).view(grad_k_bF1SH.shape))
    grad_v_bF1SH.copy_(sum_v_GSH.view(grad_v_bF1SH.shape))


@dataclass(frozen=True, slots=True)
class _GroupIndex:
    """Which rows and key heads of the whole tensors are computed together."""

    rows: slice
    heads: slice
    key_heads: int

    def part_of(self, x_BNsH: Tensor) -> Tensor:
        """Return a view of the group's part, (b, F, E, s, H)."""
        return x_BNsH[self.rows].unflatten(1, (self.key_heads, -1))[:, self.heads]

    def heads_of(self, bias_NsS: Tensor | None) -> Tensor | None:
        """Return a view of the group's part of a bias, (F, E, s, S)."""
        return None if bias_NsS is None else bias_NsS.unflatten(0, (self.key_heads, -1))[self.heads]

    def rows_of(self, is_visible_B1sS: Tensor | None) -> Tensor | None:
        """Return the group's part of a mask, (b, s, S), or (1, s, S) if it is that of all rows."""
        if is_visible_B1sS is None:
            return None
        return is_visible_B1sS[self.rows if len(is_visible_B1sS) > 1 else slice(1), 0]


def _head_groups(q_BNsH: Tensor, k_BKSH: Tensor) -> Iterator[_GroupIndex]:
    """Yield groups of key heads of a row, or of rows with all heads, whose scores fit one block."""
    rows, heads, keys, _ = k_BKSH.shape
    group_heads = max(1, _BLOCK_SCORES // (_BLOCK_ROWS * keys))
    row_scores = heads * min(_BLOCK_ROWS, q_BNsH[0, :, :, 0].numel() // heads) * keys
    group_rows = max(1, _BLOCK_SCORES // row_scores) if group_heads >= heads else 1
    for row in range(0, rows, group_rows):
        for begin in range(0, heads, group_heads):
            yield _GroupIndex(slice(row, row + group_rows), slice(begin, begin + group_heads), heads)


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
