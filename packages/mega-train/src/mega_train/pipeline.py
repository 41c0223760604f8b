"""Runs a table of a schedule on one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mega_model.mesh import Axis
from mega_train.schedule import Action, Backward, Exchange, Forward


class Work(Protocol):
    """What a stage does with a micro-batch."""

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        """The output of the stage that chunk `chunk` is: (T, D) for the next, or on the last stage a loss."""

    @property
    def boundary(self) -> tuple[int, int]:
        """(T, D) of what crosses between stages, as this rank holds it."""


def run(
    table: Sequence[Action], work: Work, pp: Axis, *, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Carry out the table.

    Returns:
        on the last stage the detached losses in the order of their micro-batches; elsewhere nothing.
    """
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    losses: list[Tensor] = []
    backward = any(isinstance(action, Backward) for action in table)

    def room() -> Tensor:
        return torch.empty(work.boundary, dtype=dtype, device=device)

    for action in table:
        match action:
            case Forward(micro):
                received = inputs.get(micro) if backward else inputs.pop(micro, None)
                output = work.forward(0, micro, received)
                if pp.rank == pp.size - 1:
                    losses.append(output.detach())
                if backward or pp.rank < pp.size - 1:
                    outputs[micro] = output
            case Backward(micro):
                outputs.pop(micro).backward(gradients.pop(micro, None))
            case Exchange() as step:
                sends, receives = [], []
                if step.receive_input is not None:
                    inputs[step.receive_input] = room()
                    receives.append((inputs[step.receive_input], pp.rank - 1))
                if step.receive_gradient is not None:
                    gradients[step.receive_gradient] = room()
                    receives.append((gradients[step.receive_gradient], pp.rank + 1))
                if step.send_output is not None:
                    sends.append((outputs[step.send_output].detach(), pp.rank + 1))
                if step.send_gradient is not None:
                    grad = inputs.pop(step.send_gradient).grad
                    assert grad is not None
                    sends.append((grad, pp.rank - 1))
                pp.exchange(sends, receives)
                if step.receive_input is not None and backward:
                    inputs[step.receive_input].requires_grad_()
                if step.send_output is not None and not backward:
                    del outputs[step.send_output]
    return losses
