"""What backward computes again instead of keeping it: which layers of a stage, and in which groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Module = Literal["core_attn", "layernorm", "mlp_act"]
MODULES: tuple[Module, ...] = get_args(Module)


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """A trade of memory for time (arXiv:2205.05198 §5).

    Attributes:
        granularity: "full", of layers only what enters them is kept; "selective", the outputs of `modules`
            are not; None, everything is kept.
        method: of "full": "uniform", all layers, what enters a group of `layers` is kept; "block", the first
            `layers` of a stage one by one, and of the rest everything is kept.
        cut: what is kept of a full group is cut over tp (arXiv:1910.02054 §6.1).
        modules: of "selective", the parts of a layer that backward computes again: "core_attn", attention
            from q, k and v; "layernorm", the norms that linear layers read, from their inputs; "mlp_act", the
            activation between the two linear layers of the feed-forward, from its input.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1
    distribute_saved: bool = False
    modules: tuple[Module, ...] = ("core_attn",)

    def recomputes(self, module: Module) -> bool:
        """Whether selective recomputation covers the module."""
        return self.granularity == "selective" and module in self.modules

    @property
    def is_custom(self) -> bool:
        """Whether selective recomputation covers other modules than by default."""
        return self.granularity == "selective" and self.modules != KEEP_ALL.modules

    def groups(self, stage: Sequence[int]) -> list[tuple[list[int], bool]]:
        """The layers of a stage in runs, each with whether it is computed again as one."""
        layers = list(stage)
        if self.granularity != "full":
            return [(layers, False)]
        if self.method == "uniform":
            return [(layers[i : i + self.layers], True) for i in range(0, len(layers), self.layers)]
        rest = [(layers[self.layers :], False)] if len(layers) > self.layers else []
        return [([layer], True) for layer in layers[: self.layers]] + rest


KEEP_ALL = RecomputePolicy()
