"""Interface of the optimizers, and the checkpoint namespaces of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from mega_schema.checkpoint.reader import MOMENTS
from mega_train.config.training import OptimizerName
from mega_train.distributed.bucket_layout import ShardRange

LoadShard = Callable[[str, ShardRange, Tensor], None]  # (namespace, range, flat values to fill)

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
MOMENTUM = "optim.momentum"
# namespaces of each optimizer's state, without the main weights
STATE_NAMESPACES: Mapping[OptimizerName, frozenset[str]] = MappingProxyType(
    {
        "adam": frozenset(MOMENTS),
        "sgd": frozenset({MOMENTUM}),
        "muon": frozenset({MOMENTUM, *MOMENTS}),
    }
)


class Optimizer(Protocol):
    """The interface of an optimizer."""

    @property
    def steps(self) -> int:
        """Number of updates."""

    def step(
        self, gradients: Sequence[Tensor], lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> None:
        """Update the main weights by the gradients of their ranges.

        Args:
            decoupled_lr: the learning rate of embedding and output, if it differs.
        """

    def state_shards(self) -> Iterator[tuple[str, ShardRange, Tensor]]:
        """Iterate over the state without the main weights: namespace, range, and its values, flat."""

    def load_state(self, load_shard: LoadShard, *, steps: int) -> None:
        """Load the state after `steps` updates; `load_shard` fills each shard."""
