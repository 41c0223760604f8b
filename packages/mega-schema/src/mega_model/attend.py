"""Where keys come from. A block computes q, k and v over one axis of tokens and calls `attend`; who calls the
model brings one of these, so that one forward serves training, scoring and generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_schema.spec import ModelSpec


class Attend(Protocol):
    """softmax(q kᵀ / √H) v over the keys a token may see."""

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """
        Args:
            layer: global number of the calling layer.
            q_TNH, k_TKH, v_TKH: of the same tokens; K divides N.

        Returns:
            (T, N, H).
        """


@dataclass(frozen=True, slots=True)
class Packed:
    """Training and scoring: rows of one length end to end, each token sees its own row up to itself.

    Attributes:
        rows, length: B and S; T = B·S.
        document_BS: number of the document each token belongs to; a token sees only its own. None: a row is
            one document.
    """

    rows: int
    length: int
    document_BS: Tensor | None = None
    _visible_B1SS: Tensor | None = field(init=False, repr=False)  # made once, for all layers

    def __post_init__(self) -> None:
        document = self.document_BS
        if document is not None:
            document = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        object.__setattr__(self, "_visible_B1SS", document)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, self.length)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        out = _dense(q, k, v, self._visible_B1SS)
        return out.transpose(1, 2).flatten(0, 1)


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

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        before, new = self._lengths[layer], q.shape[2]
        assert before + new <= self.capacity, f"{before} + {new} tokens in a cache of {self.capacity}"
        self._keys[layer, :, :, before : before + new] = k
        self._values[layer, :, :, before : before + new] = v
        self._lengths[layer] = total = before + new
        keys, values = self._keys[layer, :, :, :total], self._values[layer, :, :, :total]
        visible = None
        if before:
            visible = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(before)
        return _dense(q, keys, values, visible).transpose(1, 2).flatten(0, 1)

    def select(self, row_B: Tensor) -> None:
        """Row i becomes a copy of what row `row_B[i]` was (the surviving beams of a search)."""
        self._keys, self._values = self._keys[:, row_B], self._values[:, row_B]
        self.rows = row_B.numel()


def _dense(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Tensor | None) -> Tensor:
    """(B, N, S, H). Without `visible`, a query sees the keys up to its own place."""
    # torch's own bfloat16 attention takes twice as long on a CPU: bench/cpu_training.py
    slow = q_BNSH.device.type == "cpu" and q_BNSH.dtype == torch.bfloat16
    q, k, v = (x.float() if slow else x for x in (q_BNSH, k_BKSH, v_BKSH))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(q_BNSH.dtype)


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
