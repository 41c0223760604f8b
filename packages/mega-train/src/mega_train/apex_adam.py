"""AdamW by NVIDIA apex's kernel for many tensors at once, the one its FusedAdam calls.

apex could not be installed where this was written: the call is held against a stand-in that takes the
arguments in the order of `multi_tensor_adam_cuda` (apex, csrc/multi_tensor_adam.cu), and has not run with
apex itself; `mega-train doctor --kernels apex` checks it where that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_train.buckets import Stretch
from mega_train.optim import MOMENTS, AdamW

_DECOUPLED, _CORRECTED = 1, 1  # its AdamW mode, and bias correction
_MOST = 1 << 30  # elements of a tensor: the kernel counts them in 32 bits


class ApexAdamW(AdamW):
    """`AdamW`, its update made by `amp_C.multi_tensor_adam`; weights on a GPU.

    Raises:
        ImportError: apex is not there, or was built without its CUDA extensions.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        main: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        from amp_C import multi_tensor_adam
        from apex.multi_tensor_apply import multi_tensor_applier

        super().__init__(stretches, main, betas=betas, eps=eps)
        self._apply, self._kernel, self._betas, self._eps = (
            multi_tensor_applier,
            multi_tensor_adam,
            betas,
            eps,
        )
        self._skipped = torch.zeros(1, dtype=torch.int32, device=main[0].device)  # asked for and not read

    @property
    def steps(self) -> int:
        return self._done

    @torch.no_grad()
    def _update(self) -> None:
        self._done += 1
        for group in self._adam.param_groups:
            # without the empty ones: the kernel launches nothing more once it meets one at the end
            mains = [main for main in group["params"] if main.numel()]
            if not mains:
                continue
            moments = [[self._adam.state[main][moment] for main in mains] for moment in MOMENTS]
            lists = [_split(tensors) for tensors in ([main.grad for main in mains], mains, *moments)]
            self._apply(
                self._kernel,
                self._skipped,
                lists,
                group["lr"],
                *self._betas,
                self._eps,
                self._done,
                _DECOUPLED,
                _CORRECTED,
                group["weight_decay"],
            )

    def _state(self, *, steps: int) -> None:
        super()._state(steps=steps)
        self._done = steps


def _split(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [part for each in tensors for part in each.split(_MOST)]
