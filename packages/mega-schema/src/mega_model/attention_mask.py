"""How far back a token sees, and what distance costs: sliding windows and ALiBi.

A model has one rule; who brings its keys knows where they stand, and asks the rule for a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The rule of one rank's heads.

    Attributes:
        window: tokens that a token sees, itself and those before it (arXiv:2310.06825 §2); None: all.
        slopes: of each head, what a token of distance costs its score (arXiv:2108.12409); of none: nothing.
    """

    window: int | None = None
    slopes: tuple[float, ...] = ()

    @classmethod
    def from_spec(cls, spec: ModelSpec, tp: Axis) -> AttentionMask:
        """The rule of the heads that a rank of tp holds."""
        if spec.positions != "alibi":
            return cls(spec.window)
        heads = spec.heads // tp.size
        return cls(spec.window, alibi_slopes(spec.heads)[tp.rank * heads : (tp.rank + 1) * heads])

    @property
    def is_plain(self) -> bool:
        """Whether a token sees all that came before it, however far, at no cost."""
        return self.window is None and not self.slopes

    def visible(self, query_s: Tensor, key_S: Tensor) -> Tensor:
        """Which keys each query sees, (s, S) bool, from the places of both."""
        distance_sS = query_s[:, None] - key_S
        near_sS = distance_sS >= 0
        return near_sS if self.window is None else near_sS & (distance_sS < self.window)

    def bias(self, visible: Tensor, query_s: Tensor, key_S: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of queries and keys at these places, or who sees whom where nothing is.

        Distances are counted from the query, not from the row's first token: the softmax is the same, and the
        keys that weigh most have the numbers that a half precision holds best.

        Args:
            seen: (s, S) or (B, 1, s, S) bool, of which this rule's own `seen` is a part.

        Returns:
            (B or 1, N, s, S), -inf where a key is not seen; or `seen` of a rule without slopes.
        """
        if not self.slopes:
            return visible
        slope_N = torch.tensor(self.slopes, device=key_S.device)
        cost_1NsS = slope_N[None, :, None, None] * (key_S - query_s[:, None])  # fused kernels want all four
        return cost_1NsS.masked_fill(~visible, -torch.inf).to(dtype)


PLAIN = AttentionMask()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n), ... for n heads, a power of two; for other numbers those of the power below, and
    then every second one of the power above (arXiv:2108.12409 §3, and its authors' code).
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    return (*slopes, *between)
