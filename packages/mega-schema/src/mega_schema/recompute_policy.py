"""The activation recomputation policy: the layers of a stage that backward recomputes, and their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Module = Literal["core_attn", "layernorm", "mlp_act"]
Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
MODULES: tuple[Module, ...] = get_args(Module)


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """Activation recomputation: a trade of memory for time (arXiv:2205.05198 §5).

    Attributes:
        granularity: "full": save only the inputs of layers; "selective": do not save the outputs of
            `modules`; None: save everything.
        method: of "full": "uniform": save the input of every group of `layers` layers; "block": recompute the
            first `layers` layers of a stage one by one, and save everything of the others.
        layers: see `method`.
        distribute_saved: shard the saved inputs of "full" over tp (arXiv:1910.02054 §6.1).
        modules: of "selective", the parts of a layer that backward recomputes: "core_attn": attention from q,
            k and v; "layernorm": the norms that linear layers read, from their inputs; "mlp_act": the
            activation between the two linear layers of the feed-forward, from its input.
    """

    granularity: Granularity | None = None
    method: Method = "uniform"
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
        """Return the layers of a stage in groups, each with whether it is recomputed as one."""
        layers = list(stage)
        if self.granularity != "full":
            return [(layers, False)]
        if self.method == "uniform":
            return [(layers[i : i + self.layers], True) for i in range(0, len(layers), self.layers)]
        not_recomputed = [(layers[self.layers :], False)] if len(layers) > self.layers else []
        return [([layer], True) for layer in layers[: self.layers]] + not_recomputed


KEEP_ALL = RecomputePolicy()
