"""Attention rules that depend on distance: sliding windows, ALiBi and T5's relative positions.

A layer has one rule. The attention backend knows the positions of its keys, and asks the rule for a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The distance rule for the heads of one rank.

    Attributes:
        window: keys that a token sees, itself included (arXiv:2310.06825 §2), and without causality as many
            on the other side; None: all.
        slopes: per head, the ALiBi slope by which distance lowers the score (arXiv:2108.12409); empty: no
            ALiBi.
        bias_ND: per head, a learned bias of the score, float32, by the distance from query to key in tokens,
            -M to M; D = 2M + 1. Distances beyond have the value of M. The mask is the same with and without
            it, so it is not compared.
    """

    window: int | None = None
    slopes: tuple[float, ...] = ()
    bias_ND: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_spec(cls, spec: ModelSpec, tp: Axis, layer: int) -> AttentionMask:
        """Return the rule of a layer for the heads that this rank of tp holds."""
        window = spec.sliding_window if spec.is_local(layer) else None
        if spec.positions != "alibi":
            return cls(window)
        heads = spec.heads // tp.size
        return cls(window, alibi_slopes(spec.heads)[tp.rank * heads : (tp.rank + 1) * heads])

    @property
    def is_plain(self) -> bool:
        """Whether there is no window and no slope."""
        return self.window is None and not self.slopes

    def visible(self, query_s: Tensor, key_S: Tensor, *, causal: bool = True) -> Tensor:
        """Return the mask, (s, S) bool, of the keys that each query sees, from the positions of both.

        Args:
            causal: whether a token sees no later token; if not, there must be a window.
        """
        distance_sS = query_s[:, None] - key_S
        if not causal:
            assert self.window is not None
            return distance_sS.abs() < self.window
        near_sS = distance_sS >= 0
        return near_sS if self.window is None else near_sS & (distance_sS < self.window)

    def bias(self, visible: Tensor, query_s: Tensor, key_S: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias to add to the scores, or the boolean mask `visible` if the rule has no slopes.

        Distances are counted from the query, not from the first token of the row. The softmax is the same,
        and the largest weights get the biases that half precision represents best.

        Args:
            visible: (s, S) or (B, 1, s, S) bool; must already include this rule's own `visible`.

        Returns:
            (B or 1, N, s, S), -inf where a key is hidden; or `visible` itself.
        """
        if not self.slopes:
            return visible
        slope_N = torch.tensor(self.slopes, device=key_S.device)
        # fused kernels need all four dimensions
        cost_1NsS = slope_N[None, :, None, None] * (key_S - query_s[:, None])
        return cost_1NsS.masked_fill(~visible, -torch.inf).to(dtype)


PLAIN = AttentionMask()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the ALiBi slopes of `heads` heads: 2^(-8/n), 2^(-16/n), ... if n is a power of two.

    For another number: the slopes of the next lower power of two, then every second slope of the next higher
    one (arXiv:2108.12409 §3, and its authors' code).
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    return (*slopes, *between)
