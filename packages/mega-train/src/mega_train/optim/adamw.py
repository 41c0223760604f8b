"""AdamW by torch's fused kernel, over the float32 main weights that a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.adamw import adamw

from mega_schema.params import is_embedding_or_output
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.optim.base import MOMENT_NAMES, LoadShard


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """Parameters that are updated with the same learning rate and weight decay.

    Attributes:
        indices: indices of the parameters in the optimizer's list.
        decays: whether weight decay applies.
        is_embedding_or_output: whether they are the embedding or the output, which can have their own
            learning rate.
    """

    indices: tuple[int, ...]
    decays: bool
    is_embedding_or_output: bool


class AdamW:
    """AdamW (arXiv:1711.05101) by torch's fused kernel.

    The functional form: the class torch.optim.AdamW imports torch._dynamo, 140 MB and 1.5 s of a rank.

    Attributes:
        shard_ranges: the ranges of the parameters that this rank owns.
        main_params: the float32 weights of each range, flat; updated in place.
        steps: number of updates.
    """

    def __init__(
        self,
        shard_ranges: Sequence[ShardRange],
        main_params: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.shard_ranges = shard_ranges
        self.main_params = main_params
        self._betas = betas
        self._eps = eps
        kinds = [(shard.row.decay, is_embedding_or_output(shard.row)) for shard in shard_ranges]
        indices = {kind: tuple(i for i, k in enumerate(kinds) if k == kind) for kind in sorted(set(kinds))}
        self._groups = [AdamWGroup(indices[kind], *kind) for kind in indices]
        self._reset(steps=0)

    def step(
        self, gradients: Sequence[Tensor], lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> None:
        self.steps += 1
        with record_function("Optimizer.step#AdamW.step"):  # torch.optim's name in a profile
            for group in self._groups:
                group_lr = lr if decoupled_lr is None or not group.is_embedding_or_output else decoupled_lr
                group_gradients = [gradients[index] for index in group.indices]
                self._update(group, group_gradients, group_lr, weight_decay if group.decays else 0.0)

    @torch.no_grad()
    def _update(self, group: AdamWGroup, gradients: list[Tensor], lr: float, weight_decay: float) -> None:
        main_params, first, second, steps = (
            [tensors[index] for index in group.indices]
            for tensors in (self.main_params, *(self.moments[name] for name in MOMENT_NAMES), self._steps)
        )
        adamw(
            main_params,
            gradients,
            first,
            second,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )

    def state_shards(self) -> Iterator[tuple[str, ShardRange, Tensor]]:
        for index, shard in enumerate(self.shard_ranges):
            for moment in MOMENT_NAMES:
                yield f"optim.{moment}", shard, self.moments[moment][index]

    @torch.no_grad()
    def load_state(self, load_shard: LoadShard, *, steps: int) -> None:
        self._reset(steps=steps)
        for namespace, shard, values in self.state_shards():
            load_shard(namespace, shard, values)

    def _reset(self, *, steps: int) -> None:
        self.steps = steps
        self.moments = {
            moment: [torch.zeros_like(main_param) for main_param in self.main_params]
            for moment in MOMENT_NAMES
        }
        # torch's kernel counts the steps of each parameter on its device
        self._steps = [
            torch.tensor(float(steps), device=main_param.device) for main_param in self.main_params
        ]
