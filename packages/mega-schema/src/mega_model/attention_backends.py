"""Attention backends: where the keys and values of a forward pass come from.

A block computes q, k and v over one axis of tokens and calls its backend. The caller of the model supplies
the backend, so one forward pass serves training, scoring and generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.context_parallel import all_gather_kv, chunk_ends, token_positions
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout
from mega_model.kernels import Visible, cpu_attention
from mega_model.kernels.reference import attention, masked_softmax, to_attention_dtype
from mega_model.kernels.relative_bias import expand_bias, relative_attention
from mega_model.window_attention import attend_in_blocks, is_shorter, visible_in_blocks
from mega_schema.spec import ModelSpec


class AttentionBackend(Protocol):
    """A function that computes softmax(q kᵀ / √H) v over the keys that each token may see."""

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention.

        Args:
            layer: global number of the calling layer.
            q_TNH, k_TKH, v_TKH: queries, keys and values of the same tokens; K divides N. With `row_R` of
                `Decoder.hidden_states`, the last layer has queries of those tokens only.
            mask: the model's rule for distance: sliding window and ALiBi slopes.

        Returns:
            (T, N, H).
        """


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention for training and scoring: rows of one length end to end, each causal within itself.

    With context parallelism a rank holds the tokens at `context_parallel.token_positions` of every row. One
    all-gather collects the keys and values of all ranks; its backward is a reduce-scatter of their gradients
    (arXiv:2407.21783 §3.3.2). Each chunk of queries uses the keys up to its own end, so that ranks have equal
    work.

    On a CPU an encoder's window is computed in blocks, see `window_attention`.

    Attributes:
        rows, length: B and S, of whole rows; T = B·S / cp.
        document_BS: document number of each token, for whole rows; a token sees only its own document.
            None: each row is one document. Padding is a document too.
        causal: `ModelSpec.causal`; False lets a token see later tokens too.
        cp: the ranks that share the rows.
        dropout: dropout of the attention probabilities. It materialises all S² of them for every head.
        attention, softmax: the kernels to use; softmax is used only with dropout.
    """

    rows: int
    length: int
    document_BS: Tensor | None = None
    causal: bool = True
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    dropout: Dropout | None = None
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention
    softmax: Callable[[Tensor, Tensor | None, float], Tensor] = masked_softmax
    _visible: dict[AttentionMask, Visible] = field(
        init=False, repr=False, default_factory=dict
    )  # shared by all layers

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        q = q_TNH.unflatten(0, (self.rows, -1)).transpose(1, 2)
        k, v = self._gather_kv(k_TKH, v_TKH)
        drop = self.dropout
        score_key = None if drop is None else drop.score_keys(layer, self.rows, q.shape[1])
        if self.attends_in_blocks(mask, q.device):
            return self._attend_in_blocks(q, k, v, mask).transpose(1, 2).flatten(0, 1)
        if mask not in self._visible:
            self._visible[mask] = self._build_visible(mask, q)
        visible = self._visible[mask]
        assert mask.bias_ND is None or self.cp.size == 1, "relative positions need whole rows"
        if not isinstance(visible, str) or self.cp.size == 1:
            out = self._attend(q, k, v, visible, score_key, mask.bias_ND)
        else:
            halves = zip(
                q.chunk(2, 2), chunk_ends(self.length, self.cp), _split_halves(score_key), strict=True
            )
            outputs = [
                self._attend(x, k[:, :, :end], v[:, :, :end], "before", half) for x, end, half in halves
            ]
            out = torch.cat(outputs, 2)
        return out.transpose(1, 2).flatten(0, 1)

    def attends_in_blocks(self, mask: AttentionMask, device: torch.device) -> bool:
        """Return whether the window of a mask is computed in blocks; dropout needs scores of whole rows."""
        drops_scores = self.dropout is not None and self.dropout.attention > 0
        is_local = not self.causal and mask.window is not None and is_shorter(mask.window, self.length)
        return is_local and not drops_scores and self.cp.size == 1 and device.type == "cpu"

    def _attend_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        assert mask.window is not None
        if mask not in self._visible:
            document_BS = self.document_BS
            if document_BS is None:
                document_BS = torch.zeros(self.rows, self.length, dtype=torch.long, device=q.device)
            self._visible[mask] = visible_in_blocks(document_BS, mask.window)
        visible = self._visible[mask]
        assert isinstance(visible, Tensor)
        return attend_in_blocks(self.attention, q, k, v, visible)

    def _build_visible(self, mask: AttentionMask, q: Tensor) -> Visible:
        """Build the mask of which keys each query sees, from positions in the row."""
        assert self.causal or not mask.slopes, "slopes need causal attention"
        document_BS = self.document_BS
        if not self.causal and mask.window is not None and mask.window >= self.length:
            mask = PLAIN  # the window hides no token
        if document_BS is None and mask.is_plain:
            return "before" if self.causal else None
        key_S = torch.arange(self.length, device=q.device)
        query_s = token_positions(self.length, self.cp, device=q.device)
        near = self.causal or mask.window is not None
        visible = mask.visible(query_s, key_S, causal=self.causal) if near else None
        if document_BS is not None:
            same_document_B1sS = (document_BS[:, query_s, None] == document_BS[:, None, :])[:, None]
            visible = same_document_B1sS if visible is None else same_document_B1sS & visible
        assert visible is not None
        return mask.bias(visible, query_s, key_S, to_attention_dtype(q).dtype)

    def _gather_kv(self, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        if self.cp.size == 1:  # no copy
            k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (k_TKH, v_TKH))
        else:
            k, v = all_gather_kv(torch.stack((k_TKH, v_TKH)), self.rows, self.cp)
        return k, v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Visible,
        key_BNs: Tensor | None,
        bias_ND: Tensor | None = None,
    ) -> Tensor:
        return attend_with_dropout(
            self.attention, self.softmax, q, k, v, visible, self.dropout, key_BNs, bias_ND
        )


@dataclass(frozen=True, slots=True)
class PaddedCrossAttention:
    """Attention of a decoder's rows to the encoder's rows of the same samples, of another length.

    Attributes:
        rows: B.
        is_visible_BS: which of the encoder's tokens a decoder sees: those that are no padding. None: all.
        dropout, attention, softmax: as of `PackedAttention`.
    """

    rows: int
    is_visible_BS: Tensor | None = None
    dropout: Dropout | None = None
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention
    softmax: Callable[[Tensor, Tensor | None, float], Tensor] = masked_softmax

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        """Compute attention; k and v are of the encoder's tokens."""
        assert mask.is_plain, "windows and slopes need causal attention"
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        visible = self.is_visible_BS
        if visible is not None:
            visible = visible[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        drop = self.dropout
        key_BNs = None if drop is None else drop.score_keys(layer, self.rows, q.shape[1])
        out = attend_with_dropout(self.attention, self.softmax, q, k, v, visible, drop, key_BNs)
        return out.transpose(1, 2).flatten(0, 1)


class KVCacheAttention:
    """Attention for generation: keys and values of earlier tokens are cached; all rows have the same length.

    A forward pass over T = B·S tokens adds S tokens to every row.

    Attributes:
        rows: B.
        capacity: maximum tokens of a row.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.rows = rows
        self.capacity = capacity
        shape = (spec.layers, rows, spec.kv_heads, capacity, spec.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._lengths = [0] * spec.layers

    @property
    def length(self) -> int:
        """Cached tokens of every row, in all layers."""
        return min(self._lengths)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        cached = self._lengths[layer]
        new = q.shape[2]
        assert cached + new <= self.capacity, f"{cached} + {new} tokens in a cache of {self.capacity}"
        self._keys[layer, :, :, cached : cached + new] = k
        self._values[layer, :, :, cached : cached + new] = v
        self._lengths[layer] = total = cached + new
        first = 0 if mask.window is None else max(0, cached + 1 - mask.window)
        keys, values = self._keys[layer, :, :, first:total], self._values[layer, :, :, first:total]
        visible: Visible = "before"
        if not mask.is_plain and (new > 1 or mask.slopes):
            key_S = torch.arange(first, total, device=q.device)
            query_s = key_S[cached - first :]
            visible = mask.bias(mask.visible(query_s, key_S), query_s, key_S, to_attention_dtype(q).dtype)
        return attention(q, keys, values, visible).transpose(1, 2).flatten(0, 1)

    def select(self, row_B: Tensor) -> None:
        """Make row i a copy of the previous row `row_B[i]` (reordering of beams)."""
        self._keys = self._keys[:, row_B]
        self._values = self._values[:, row_B]
        self.rows = row_B.numel()


def attend_with_dropout(
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor],
    softmax: Callable[[Tensor, Tensor | None, float], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    dropout: Dropout | None,
    key_BNs: Tensor | None,
    bias_ND: Tensor | None = None,
) -> Tensor:
    """Compute attention by the kernel, or with dropout of the probabilities if there are keys for it."""
    if key_BNs is None and bias_ND is not None:
        is_blockwise = q.device.type == "cpu" and q.dtype != torch.float64
        kernel = cpu_attention.relative_attention if is_blockwise else relative_attention
        return kernel(q, k, v, visible, bias_ND)
    if key_BNs is None:
        return attention(q, k, v, visible)
    assert dropout is not None
    drop = partial(dropout.drop_scores, row_BNs=key_BNs)
    return _attention_with_dropout(q, k, v, visible, drop, softmax, bias_ND)


def _split_halves(key_BNs: Tensor | None) -> Sequence[Tensor | None]:
    return (None, None) if key_BNs is None else key_BNs.chunk(2, 2)


def _attention_with_dropout(
    q_BNsH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    visible: Visible,
    drop: Callable[[Tensor], Tensor],
    softmax: Callable[[Tensor, Tensor | None, float], Tensor],
    bias_ND: Tensor | None,
) -> Tensor:
    """Attention with dropout of the probabilities, which are materialised in full.

    torch's fused kernels choose dropped elements by their own order of computation, which differs between
    layouts.
    """
    q, k, v = (to_attention_dtype(x) for x in (q_BNsH, k_BKSH, v_BKSH))
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(visible, str):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    group_size = q.shape[1] // k.shape[1]  # query heads per key head
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    # Scale the queries, not the scores: float16 does not overflow, and autograd then keeps a copy of the
    # queries instead of the whole QKV projection that they are a view of.
    score = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    if bias_ND is not None:
        score = score + expand_bias(bias_ND, queries, keys).to(score.dtype)
    return (drop(softmax(score, visible, 1.0)) @ v).to(q_BNsH.dtype)


def document_positions(token_BS: Tensor, eod: int) -> tuple[Tensor, Tensor]:
    """Return each token's document number within its row and its position within the document; both (B, S).

    A document ends with its `eod`; the next token begins another (Megatron's --reset-attention-mask and
    --reset-position-ids).
    """
    end_BS = token_BS == eod
    number_BS = end_BS.cumsum(1) - end_BS.long()
    position_S = torch.arange(token_BS.shape[1], device=token_BS.device)
    first_BS = torch.zeros_like(token_BS)
    first_BS[:, 1:] = torch.where(end_BS[:, :-1], position_S[1:], 0)
    return number_BS, position_S - first_BS.cummax(1).values
