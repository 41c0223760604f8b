"""SGD with momentum, over the float32 main weights that a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mega_schema.params import is_embedding_or_output
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.optim.base import MOMENTUM, LoadShard


class SGD:
    """SGD with momentum (Sutskever et al. 2013) and the decay in the gradient, as apex's FusedSGD and torch.

    b = momentum · b + g + decay · w, w -= lr · b.
    """

    def __init__(
        self, shard_ranges: Sequence[ShardRange], main_params: Sequence[Tensor], *, momentum: float
    ) -> None:
        self.shard_ranges = shard_ranges
        self.main_params = list(main_params)
        self.momentum = momentum
        self.steps = 0
        self._buffers = [torch.zeros_like(main_param) for main_param in main_params]

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> None:
        torch._foreach_mul_(self._buffers, self.momentum)
        torch._foreach_add_(self._buffers, list(gradients))
        decaying = [index for index, shard in enumerate(self.shard_ranges) if shard.row.decay]
        if decaying and weight_decay:
            buffers, main_params = (
                [tensors[index] for index in decaying] for tensors in (self._buffers, self.main_params)
            )
            torch._foreach_add_(buffers, main_params, alpha=weight_decay)
        for is_embedding, group_lr in ((False, lr), (True, lr if decoupled_lr is None else decoupled_lr)):
            pairs = zip(self.main_params, self._buffers, self.shard_ranges, strict=True)
            selected = [(m, b) for m, b, shard in pairs if is_embedding_or_output(shard.row) == is_embedding]
            if selected:
                torch._foreach_add_([m for m, _ in selected], [b for _, b in selected], alpha=-group_lr)
        self.steps += 1

    def state_shards(self) -> Iterator[tuple[str, ShardRange, Tensor]]:
        for shard, buffer in zip(self.shard_ranges, self._buffers, strict=True):
            yield MOMENTUM, shard, buffer

    @torch.no_grad()
    def load_state(self, load_shard: LoadShard, *, steps: int) -> None:
        self.steps = steps
        for namespace, shard, values in self.state_shards():
            load_shard(namespace, shard, values)
