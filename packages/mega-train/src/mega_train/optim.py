"""AdamW over the float32 main weights that a rank keeps, and its state as named stretches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mega_train.buckets import Stretch

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) by torch's fused kernel.

    Attributes:
        stretches: what this rank keeps of its parameters.
        main: the float32 weights of each, flat; the update is done on them.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        main: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.stretches, self.main = stretches, main
        groups = [
            {
                "params": [
                    m for stretch, m in zip(stretches, main, strict=True) if stretch.row.decay == decays
                ],
                "decays": decays,
            }
            for decays in (True, False)
        ]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=eps, fused=True)
        self._state(steps=0)

    @property
    def steps(self) -> int:
        """Updates done."""
        return int(self._adam.state[self.main[0]]["step"])

    def step(self, gradients: Sequence[Tensor], rate: float, weight_decay: float) -> None:
        """One update with these gradients of the stretches, this learning rate and this weight decay."""
        for main, gradient in zip(self.main, gradients, strict=True):
            main.grad = gradient
        for group in self._adam.param_groups:
            group["lr"] = rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._adam.step()

    def state(self) -> Iterator[tuple[str, Stretch, Tensor]]:
        """What is kept beside the main weights: namespace, stretch, and its values, flat."""
        for stretch, main in zip(self.stretches, self.main, strict=True):
            for moment in MOMENTS:
                yield f"optim.{moment}", stretch, self._adam.state[main][moment]

    @torch.no_grad()
    def load(self, fill: Callable[[str, Stretch, Tensor], None], *, steps: int) -> None:
        """Take up the state of a run.

        Args:
            fill: called with a namespace, a stretch and the values to set, flat.
            steps: updates done so far.
        """
        self._state(steps=steps)
        for space, stretch, values in self.state():
            fill(space, stretch, values)

    def _state(self, *, steps: int) -> None:
        for main in self.main:
            self._adam.state[main] = {
                "step": torch.tensor(float(steps), device=main.device),
                **{moment: torch.zeros_like(main) for moment in MOMENTS},
            }
