"""Where keys come from. A block computes q, k and v over one axis of tokens and calls `attend`; who calls the
model brings one of these, so that one forward serves training, scoring and generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mega_model.attention_mask import PLAIN, Reach
from mega_model.context_parallel import chunk_ends, places, whole_rows
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout
from mega_model.kernels import Visible
from mega_model.kernels.reference import attention, attention_dtype, masked_softmax
from mega_schema.spec import ModelSpec


class Attend(Protocol):
    """softmax(q kᵀ / √H) v over the keys a token may see."""

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, reach: Reach = PLAIN
    ) -> Tensor:
        """
        Args:
            layer: global number of the calling layer.
            q_TNH, k_TKH, v_TKH: of the same tokens; K divides N.
            reach: the model's rule of distance.

        Returns:
            (T, N, H).
        """


@dataclass(frozen=True, slots=True)
class Packed:
    """Training and scoring: rows of one length end to end, each token sees its own row up to itself.

    With context parallelism a rank brings the tokens at `context_parallel.places` of every row, and the
    keys and values of all ranks are gathered in one exchange; on the way back their gradients are
    summed and parted again (arXiv:2407.21783 §3.3.2). A chunk is computed with the keys up to its end:
    ranks have equal work.

    Attributes:
        rows, length: B and S, the whole row's; T = B·S / cp.
        document_BS: number of the document of each token, of the whole rows; a token sees only its own.
            None: a row is one document.
        causal: False lets a token see the tokens after it too (BERT).
        cp: the ranks that share the rows.
        dropout: what training drops of the probabilities. Then they are computed and kept as a whole, S² of
            them for every head.
        attention, softmax: a record's; the second with dropout.
    """

    rows: int
    length: int
    document_BS: Tensor | None = None
    causal: bool = True
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    dropout: Dropout | None = None
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attention
    softmax: Callable[[Tensor, Tensor | None, float], Tensor] = masked_softmax
    _visible: dict[Reach, Visible] = field(init=False, repr=False, default_factory=dict)  # for all layers

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, reach: Reach = PLAIN
    ) -> Tensor:
        q = q_TNH.unflatten(0, (self.rows, -1)).transpose(1, 2)
        k, v = self._whole_rows(k_TKH, v_TKH)
        drop = self.dropout
        dropped = None if drop is None else drop.rows_of_scores(layer, self.rows, q.shape[1])
        if reach not in self._visible:
            self._visible[reach] = self._seen_within(reach, q)
        visible = self._visible[reach]
        if not isinstance(visible, str) or self.cp.size == 1:
            out = self._part(q, k, v, visible, dropped)
        else:
            halves = zip(q.chunk(2, 2), chunk_ends(self.length, self.cp), _halves(dropped), strict=True)
            parts = [self._part(x, k[:, :, :end], v[:, :, :end], "before", some) for x, end, some in halves]
            out = torch.cat(parts, 2)
        return out.transpose(1, 2).flatten(0, 1)

    def _seen_within(self, reach: Reach, q: Tensor) -> Visible:
        """Who sees whom, by places in the row."""
        assert self.causal or reach.plain, "distance counts where a token sees those before it"
        document_BS = self.document_BS
        if document_BS is None and reach.plain:
            return "before" if self.causal else None
        key_S = torch.arange(self.length, device=q.device)
        mine_s = places(self.length, self.cp, device=q.device)
        seen = reach.seen(mine_s, key_S) if self.causal else None
        if document_BS is not None:
            same_B1sS = (document_BS[:, mine_s, None] == document_BS[:, None, :])[:, None]
            seen = same_B1sS if seen is None else same_B1sS & seen
        assert seen is not None
        return reach.mask(seen, mine_s, key_S, attention_dtype(q).dtype)

    def _whole_rows(self, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        if self.cp.size == 1:  # no copy
            k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (k_TKH, v_TKH))
        else:
            k, v = whole_rows(torch.stack((k_TKH, v_TKH)), self.rows, self.cp)
        return k, v

    def _part(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, dropped_BNs: Tensor | None) -> Tensor:
        if dropped_BNs is None:
            return self.attention(q, k, v, visible)
        assert self.dropout is not None
        return _dropping(q, k, v, visible, partial(self.dropout.scores, row_BNs=dropped_BNs), self.softmax)


class Cached:
    """Generation: keys and values of what came before are kept; all rows have the same length.

    A forward pass over T = B·S tokens adds S tokens to every row.

    Attributes:
        rows: B.
        capacity: most tokens a row can come to.
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
        self.rows, self.capacity = rows, capacity
        shape = (spec.layers, rows, spec.kv_heads, capacity, spec.head_width)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._lengths = [0] * spec.layers

    @property
    def length(self) -> int:
        """Tokens in every row that all layers have seen."""
        return min(self._lengths)

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, reach: Reach = PLAIN
    ) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        before, new = self._lengths[layer], q.shape[2]
        assert before + new <= self.capacity, f"{before} + {new} tokens in a cache of {self.capacity}"
        self._keys[layer, :, :, before : before + new] = k
        self._values[layer, :, :, before : before + new] = v
        self._lengths[layer] = total = before + new
        first = 0 if reach.window is None else max(0, before + 1 - reach.window)
        keys, values = self._keys[layer, :, :, first:total], self._values[layer, :, :, first:total]
        visible: Visible = "before"
        if not reach.plain and (new > 1 or reach.slopes):
            key_S = torch.arange(first, total, device=q.device)
            query_s = key_S[before - first :]
            visible = reach.mask(reach.seen(query_s, key_S), query_s, key_S, attention_dtype(q).dtype)
        return attention(q, keys, values, visible).transpose(1, 2).flatten(0, 1)

    def select(self, row_B: Tensor) -> None:
        """Row i becomes a copy of what row `row_B[i]` was (the surviving beams of a search)."""
        self._keys, self._values = self._keys[:, row_B], self._values[:, row_B]
        self.rows = row_B.numel()


def _halves(row_BNs: Tensor | None) -> Sequence[Tensor | None]:
    return (None, None) if row_BNs is None else row_BNs.chunk(2, 2)


def _dropping(
    q_BNsH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    visible: Visible,
    drop: Callable[[Tensor], Tensor],
    softmax: Callable[[Tensor, Tensor | None, float], Tensor],
) -> Tensor:
    """The same with probabilities dropped. They exist as a whole: torch's kernels drop by the order in which
    they compute, and so would differ from layout to layout.
    """
    q, k, v = (attention_dtype(x) for x in (q_BNsH, k_BKSH, v_BKSH))
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(visible, str):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    each = q.shape[1] // k.shape[1]  # query heads of a key head
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    # the queries are scaled, not the scores: float16 does not overflow, and a copy of them is kept,
    # not all of the product that Q, K and V lie in
    score = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    return (drop(softmax(score, visible, 1.0)) @ v).to(q_BNsH.dtype)


def documents(token_BS: Tensor, eod: int) -> tuple[Tensor, Tensor]:
    """Number of the document of each token in its row, and the token's place in that document; both (B, S).

    A document ends with its `eod`; the next token begins another (Megatron's --reset-attention-mask and
    --reset-position-ids).
    """
    end_BS = token_BS == eod
    number_BS = end_BS.cumsum(1) - end_BS.long()
    place_S = torch.arange(token_BS.shape[1], device=token_BS.device)
    first_BS = torch.zeros_like(token_BS)
    first_BS[:, 1:] = torch.where(end_BS[:, :-1], place_S[1:], 0)
    return number_BS, place_S - first_BS.cummax(1).values
