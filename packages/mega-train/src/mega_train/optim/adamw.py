"""Optimizers over the float32 main weights that a rank keeps, and their state as named stretches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.adamw import adamw

from mega_schema.params import is_embedding_or_output
from mega_train.distributed.bucket_layout import Stretch

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


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """Parameters that are updated alike.

    Attributes:
        places: of the parameters, among those of the optimizer.
        decays: whether weight decay moves them.
        is_end: whether they are the embedding or the output, which can have a learning rate of their own.
    """

    places: tuple[int, ...]
    decays: bool
    is_end: bool


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) by torch's fused kernel.

    The functional form: the class torch.optim.AdamW imports torch._dynamo, 140 MB and 1.5 s of a rank.

    Attributes:
        stretches: what this rank keeps of its parameters.
        main: the float32 weights of each, flat; the update is done on them.
        steps: updates done.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        main: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.stretches, self.main, self._betas, self._eps = stretches, main, betas, eps
        kinds = [(stretch.row.decay, is_embedding_or_output(stretch.row)) for stretch in stretches]
        places = {kind: tuple(i for i, k in enumerate(kinds) if k == kind) for kind in sorted(set(kinds))}
        self._groups = [AdamWGroup(places[kind], *kind) for kind in places]
        self._reset(steps=0)

    def step(
        self, gradients: Sequence[Tensor], rate: float, weight_decay: float, ends: float | None = None
    ) -> None:
        self.steps += 1
        with record_function("Optimizer.step#AdamW.step"):  # torch.optim's name in a profile
            for group in self._groups:
                own_rate = rate if ends is None or not group.is_end else ends
                own_gradients = [gradients[place] for place in group.places]
                self._update(group, own_gradients, own_rate, weight_decay if group.decays else 0.0)

    @torch.no_grad()
    def _update(self, group: AdamWGroup, gradients: list[Tensor], lr: float, weight_decay: float) -> None:
        mains, first, second, steps = (
            [tensors[place] for place in group.places]
            for tensors in (self.main, *(self.moments[name] for name in MOMENTS), self._steps)
        )
        adamw(
            mains,
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

    def state(self) -> Iterator[tuple[str, Stretch, Tensor]]:
        for place, stretch in enumerate(self.stretches):
            for moment in MOMENTS:
                yield f"optim.{moment}", stretch, self.moments[moment][place]

    @torch.no_grad()
    def load(self, fill: Fill, *, steps: int) -> None:
        self._reset(steps=steps)
        for space, stretch, values in self.state():
            fill(space, stretch, values)

    def _reset(self, *, steps: int) -> None:
        self.steps = steps
        self.moments = {moment: [torch.zeros_like(main) for main in self.main] for moment in MOMENTS}
        # torch's kernel counts the steps of each parameter on its device
        self._steps = [torch.tensor(float(steps), device=main.device) for main in self.main]


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
