"""What backward computes again instead of keeping it: which layers of a stage, and in which groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Recompute:
    """A trade of memory for time (arXiv:2205.05198 §5).

    Attributes:
        granularity: "full", of layers only what enters them is kept; "selective", of attention only q, k and
            v are; None, everything is kept.
        method: of "full": "uniform", all layers, what enters a group of `layers` is kept; "block", the first
            `layers` of a stage one by one, and of the rest everything is kept.
        cut: what is kept of a full group is cut over tp (arXiv:1910.02054 §6.1).
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1
    cut: bool = False

    def groups(self, stage: Sequence[int]) -> list[tuple[list[int], bool]]:
        """The layers of a stage in runs, each with whether it is computed again as one."""
        layers = list(stage)
        if self.granularity != "full":
            return [(layers, False)]
        if self.method == "uniform":
            return [(layers[i : i + self.layers], True) for i in range(0, len(layers), self.layers)]
        rest = [(layers[self.layers :], False)] if len(layers) > self.layers else []
        return [([layer], True) for layer in layers[: self.layers]] + rest


KEEP_ALL = Recompute()
