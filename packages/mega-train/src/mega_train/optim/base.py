"""What the trainer asks of an optimizer, and the checkpoint namespaces that hold each optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

from torch import Tensor

from mega_train.distributed.bucket_layout import ShardRange

OptimizerName = Literal["adam", "sgd", "muon"]
LoadShard = Callable[[str, ShardRange, Tensor], None]  # a namespace, a stretch and the values to set, flat

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "optim.momentum"
# the namespaces that hold an optimizer's state, beside the main weights
STATE_NAMESPACES: Mapping[OptimizerName, frozenset[str]] = MappingProxyType(
    {
        "adam": frozenset({"optim.exp_avg", "optim.exp_avg_sq"}),
        "sgd": frozenset({MOMENTUM}),
        "muon": frozenset({MOMENTUM, "optim.exp_avg", "optim.exp_avg_sq"}),
    }
)


class Optimizer(Protocol):
    """What a trainer asks of one."""

    @property
    def steps(self) -> int:
        """Updates done."""

    def step(
        self, gradients: Sequence[Tensor], lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> None:
        """One update with these gradients of the stretches, this learning rate and this weight decay.

        Args:
            ends: the learning rate of embedding and output, where it is another.
        """

    def state_shards(self) -> Iterator[tuple[str, ShardRange, Tensor]]:
        """What is kept beside the main weights: namespace, stretch, and its values, flat."""

    def load_state(self, load_shard: LoadShard, *, steps: int) -> None:
        """Take up the state of a run: `fill` sets every part of it. `steps` updates were done so far."""
