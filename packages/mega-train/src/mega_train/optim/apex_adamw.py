"""AdamW by NVIDIA apex's multi-tensor kernel, the one that its FusedAdam calls.

Never run with apex itself, which could not be installed: the tests use a stand-in with the arguments of
`multi_tensor_adam_cuda` (apex, csrc/multi_tensor_adam.cu). `mega-train doctor --kernels apex` checks the
kernel on a machine that has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_train.distributed.bucket_layout import ShardRange
from mega_train.optim.adamw import AdamW, AdamWGroup
from mega_train.optim.base import MOMENT_NAMES

_DECOUPLED, _BIAS_CORRECTION = 1, 1  # AdamW mode and bias correction of the kernel
_MAX_ELEMENTS = 1 << 30  # elements of a tensor: the kernel counts them in 32 bits


class ApexAdamW(AdamW):
    """`AdamW` with the update by `amp_C.multi_tensor_adam`; weights on a GPU.

    Raises:
        ImportError: apex is not installed, or was built without its CUDA extensions.
    """

    def __init__(
        self,
        shard_ranges: Sequence[ShardRange],
        main_params: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        from amp_C import multi_tensor_adam
        from apex.multi_tensor_apply import multi_tensor_applier

        super().__init__(shard_ranges, main_params, betas=betas, eps=eps)
        self._apply = multi_tensor_applier
        self._kernel = multi_tensor_adam
        self._skipped = torch.zeros(
            1, dtype=torch.int32, device=main_params[0].device
        )  # overflow flag: a required argument that is not read

    @torch.no_grad()
    def _update(self, group: AdamWGroup, gradients: list[Tensor], lr: float, weight_decay: float) -> None:
        # leave out empty tensors: with one at the end the kernel does not launch the remaining work
        nonempty = [index for index in group.indices if self.main_params[index].numel()]
        if not nonempty:
            return
        group_gradients = [
            g for index, g in zip(group.indices, gradients, strict=True) if self.main_params[index].numel()
        ]
        tensors = (self.main_params, *(self.moments[name] for name in MOMENT_NAMES))
        lists = [
            _split(group_gradients),
            *(_split([tensor_list[index] for index in nonempty]) for tensor_list in tensors),
        ]
        self._apply(
            self._kernel,
            self._skipped,
            lists,
            lr,
            *self._betas,
            self._eps,
            self.steps,
            _DECOUPLED,
            _BIAS_CORRECTION,
            weight_decay,
        )


def _split(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in tensor.split(_MAX_ELEMENTS)]
