"""AdamW over float32 main weights, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mega_schema.params import Param
from mega_schema.shard import Slab

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) by torch's fused kernel.

    The update is done in float32: for float32 weights on the weights themselves, for others on float32 copies
    that are then rounded to them.

    Attributes:
        main: the float32 weights, in the order given.
    """

    def __init__(
        self,
        held: Sequence[tuple[Param, nn.Parameter]],
        gradients: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.rows, self.weights = [row for row, _ in held], [weight for _, weight in held]
        self.main = [w.detach() if w.dtype == torch.float32 else w.detach().float() for w in self.weights]
        for main, gradient in zip(self.main, gradients, strict=True):
            main.grad = gradient
        groups = [
            {
                "params": [m for row, m in zip(self.rows, self.main, strict=True) if row.decay == decays],
                "weight_decay": weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=eps, fused=True)
        self._state(steps=0)

    @property
    def steps(self) -> int:
        """Updates done."""
        return int(self._adam.state[self.main[0]]["step"])

    def step(self, rate: float) -> None:
        """One update with this learning rate."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._round()

    def tensors(self) -> Iterator[tuple[str, Param, Tensor]]:
        """What a checkpoint keeps beside the weights: namespace, row, and this rank's share of the tensor."""
        for row, main, weight in zip(self.rows, self.main, self.weights, strict=True):
            if weight.dtype != torch.float32:
                yield "optim.main", row, main
            for moment in MOMENTS:
                yield f"optim.{moment}", row, self._adam.state[main][moment]

    @torch.no_grad()
    def load(self, read: Callable[[str, Param, Slab], np.ndarray], slabs: Slabs, *, steps: int) -> None:
        """Take up the state of a run.

        Args:
            read: called with a namespace, a row and a box of it that this rank holds.
            slabs: the boxes of a row that this rank holds.
            steps: updates done so far.
        """
        self._state(steps=steps)
        for space, row, tensor in self.tensors():
            for slab in slabs(row):
                tensor[slab.in_local] = torch.from_numpy(read(space, row, slab)).to(tensor.device)
        self._round()

    def _state(self, *, steps: int) -> None:
        for main in self.main:
            self._adam.state[main] = {
                "step": torch.tensor(float(steps), device=main.device),
                **{moment: torch.zeros_like(main) for moment in MOMENTS},
            }

    @torch.no_grad()
    def _round(self) -> None:
        for main, weight in zip(self.main, self.weights, strict=True):
            if weight.dtype != torch.float32:
                weight.copy_(main)


Slabs = Callable[[Param], Sequence[Slab]]
