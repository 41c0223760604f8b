"""Optimizers over the float32 main weights that a rank keeps, and their state as named stretches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from mega_schema.params import is_embedding_or_output
from mega_train.buckets import Stretch

Name = Literal["adam", "sgd", "muon"]
Fill = Callable[[str, Stretch, Tensor], None]  # a namespace, a stretch and the values to set, flat

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "optim.momentum"
# the namespaces that hold an optimizer's state, beside the main weights
STATE: Mapping[Name, frozenset[str]] = MappingProxyType(
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
        self, gradients: Sequence[Tensor], rate: float, weight_decay: float, ends: float | None = None
    ) -> None:
        """One update with these gradients of the stretches, this learning rate and this weight decay.

        Args:
            ends: the learning rate of embedding and output, where it is another.
        """

    def state(self) -> Iterator[tuple[str, Stretch, Tensor]]:
        """What is kept beside the main weights: namespace, stretch, and its values, flat."""

    def load(self, fill: Fill, *, steps: int) -> None:
        """Take up the state of a run: `fill` sets every part of it. `steps` updates were done so far."""


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
        kinds = [(stretch.row.decay, is_embedding_or_output(stretch.row)) for stretch in stretches]
        groups = [
            {
                "params": [m for kind, m in zip(kinds, main, strict=True) if kind == (decays, end)],
                "decays": decays,
                "end": end,
            }
            for decays, end in itertools.product((True, False), repeat=2)
        ]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=eps, fused=True)
        self._state(steps=0)

    @property
    def steps(self) -> int:
        return int(self._adam.state[self.main[0]]["step"])

    def step(
        self, gradients: Sequence[Tensor], rate: float, weight_decay: float, ends: float | None = None
    ) -> None:
        for main, gradient in zip(self.main, gradients, strict=True):
            main.grad = gradient
        for group in self._adam.param_groups:
            group["lr"] = rate if ends is None or not group["end"] else ends
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._update()

    def _update(self) -> None:
        self._adam.step()

    def state(self) -> Iterator[tuple[str, Stretch, Tensor]]:
        for stretch, main in zip(self.stretches, self.main, strict=True):
            for moment in MOMENTS:
                yield f"optim.{moment}", stretch, self._adam.state[main][moment]

    @torch.no_grad()
    def load(self, fill: Fill, *, steps: int) -> None:
        self._state(steps=steps)
        for space, stretch, values in self.state():
            fill(space, stretch, values)

    def _state(self, *, steps: int) -> None:
        for main in self.main:
            self._adam.state[main] = {
                "step": torch.tensor(float(steps), device=main.device),
                **{moment: torch.zeros_like(main) for moment in MOMENTS},
            }


class SGD:
    """Momentum (Sutskever et al. 2013), the decay added to the gradient: b = momentum · b + g + decay · w,
    w -= rate · b, as apex's FusedSGD and torch's.
    """

    def __init__(self, stretches: Sequence[Stretch], main: Sequence[Tensor], *, momentum: float) -> None:
        self.stretches, self.main, self.momentum = stretches, list(main), momentum
        self.steps = 0
        self._buffers = [torch.zeros_like(each) for each in main]

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], rate: float, weight_decay: float, ends: float | None = None
    ) -> None:
        torch._foreach_mul_(self._buffers, self.momentum)
        torch._foreach_add_(self._buffers, list(gradients))
        decaying = [number for number, stretch in enumerate(self.stretches) if stretch.row.decay]
        if decaying and weight_decay:
            buffers, main = ([of[number] for number in decaying] for of in (self._buffers, self.main))
            torch._foreach_add_(buffers, main, alpha=weight_decay)
        for end, its_rate in ((False, rate), (True, rate if ends is None else ends)):
            pairs = zip(self.main, self._buffers, self.stretches, strict=True)
            these = [(m, b) for m, b, stretch in pairs if is_embedding_or_output(stretch.row) == end]
            if these:
                torch._foreach_add_([m for m, _ in these], [b for _, b in these], alpha=-its_rate)
        self.steps += 1

    def state(self) -> Iterator[tuple[str, Stretch, Tensor]]:
        for stretch, buffer in zip(self.stretches, self._buffers, strict=True):
            yield MOMENTUM, stretch, buffer

    @torch.no_grad()
    def load(self, fill: Fill, *, steps: int) -> None:
        self.steps = steps
        for space, stretch, values in self.state():
            fill(space, stretch, values)
