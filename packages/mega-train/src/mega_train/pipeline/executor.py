"""Runs a table of a schedule on one rank.

Messages travel while the rank computes. A table says when a message begins to be sent or received; the rank
waits for it where it cannot go on without it: a pass for what it needs, and a line
(`mega_model.distributed.pipeline_p2p`) for the message before, so that one message at a time is on its way
on it. The ends of a line agree on the order of its messages, since both tables come from one order of
passes; `simulator.check` proves it of a schedule, on lines that hold no message at all. On a GPU to wait is
to let the compute stream wait; the CPU goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mega_model.distributed.pipeline_p2p import P2PChannel, PendingMessage, PipelineChannels
from mega_model.weight_gradients import WeightGradients
from mega_train.pipeline.schedules import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ReceiveGradient,
    ReceiveInput,
    SendGradient,
    SendOutput,
)
from mega_train.telemetry.timers import Timed, untimed

Pass = tuple[int, int]  # chunk and micro-batch


class Work(Protocol):
    """What a rank does with a micro-batch."""

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        """The output of the stage that chunk `chunk` is: (T, D) for the next, or on the last stage a loss.

        It is freed once it is sent, so nothing that the backward pass reads may lie in its storage.
        """

    @property
    def boundary(self) -> tuple[int, int]:
        """(T, D) of what crosses between stages, as this rank holds it."""


def run(
    table: Sequence[Action],
    work: Work,
    lines: PipelineChannels,
    weights: WeightGradients,
    *,
    dtype: torch.dtype,
    device: torch.device,
    done: Callable[[], object] = lambda: None,
    timed: Timed = untimed,
) -> list[Tensor]:
    """Carry out the table.

    Args:
        weights: where backward passes leave the gradients of weights; it puts them off where the table does.
        done: called after every action.
        timed: a context for each phase by its name: passes, and waiting for messages.

    Returns:
        on the rank of the last stage the detached losses in the order of their micro-batches; elsewhere
        nothing.
    """
    execution = _Execution(table, work, lines, weights, dtype, device, timed)
    for action in table:
        execution.do(action)
        done()
    return execution.end()


class _Execution:
    """One rank on its way through its table.

    Attributes:
        inputs, outputs: of passes whose backward is still to come, on this rank's side of the graph.
    """

    def __init__(
        self,
        table: Sequence[Action],
        work: Work,
        lines: PipelineChannels,
        weights: WeightGradients,
        dtype: torch.dtype,
        device: torch.device,
        timed: Timed,
    ) -> None:
        self.timed = timed
        self.work, self.weights, self.dtype, self.device = work, weights, dtype, device
        self.training = any(isinstance(action, Backward | BackwardInput) for action in table)
        self.passed_on = {(a.chunk, a.micro) for a in table if isinstance(a, SendOutput)}
        self.inputs: dict[Pass, Tensor] = {}
        self.outputs: dict[Pass, Tensor] = {}
        self.losses: list[Tensor] = []
        self.output, self.input_gradient = _End(lines.output), _End(lines.input_gradient)
        self.input, self.output_gradient = _End(lines.input), _End(lines.output_gradient)
        self.coming: dict[Action, PendingMessage] = {}

    def do(self, action: Action) -> None:
        which = action.chunk, action.micro
        match action:
            case ReceiveInput():
                self.coming[action] = self.input.begin(self._room())
            case ReceiveGradient():
                self.coming[action] = self.output_gradient.begin(self._room())
            case SendOutput():
                output = self.outputs[which] if self.training else self.outputs.pop(which)
                self.output.begin(output.detach(), emptied=self.training)
            case SendGradient():
                gradient = self.inputs.pop(which).grad
                assert gradient is not None
                self.input_gradient.begin(gradient)
            case Forward():
                self._forward(which)
            case Backward():
                self._backward(which)
            case BackwardInput():
                with self.weights.defer(which):
                    self._backward(which)
            case BackwardWeight():
                with self.timed("backward-compute"):
                    self.weights.run_deferred(which)

    def end(self) -> list[Tensor]:
        """Wait until all is sent; the losses."""
        self.output.end()
        self.input_gradient.end()
        return self.losses

    def _room(self) -> Tensor:
        return torch.empty(self.work.boundary, dtype=self.dtype, device=self.device)

    def _forward(self, which: Pass) -> None:
        message = self.coming.pop(ReceiveInput(*which), None)
        received = None if message is None else self._arrived(message, "forward-recv")
        if received is not None and self.training:
            self.inputs[which] = received.requires_grad_()
        with self.timed("forward-compute"):
            output = self.work.forward(*which, received)
        if which not in self.passed_on:
            self.losses.append(output.detach())
        if self.training or which in self.passed_on:
            self.outputs[which] = output

    def _backward(self, which: Pass) -> None:
        message = self.coming.pop(ReceiveGradient(*which), None)
        gradient = None if message is None else self._arrived(message, "backward-recv")
        with self.timed("backward-compute"):
            self.outputs.pop(which).backward(gradient)

    def _arrived(self, message: PendingMessage, phase: str) -> Tensor:
        with self.timed(phase):
            return message.wait()


class _End:
    """An end of a line on which one message at a time is on its way."""

    def __init__(self, line: P2PChannel | None) -> None:
        self.line = line
        self.now: PendingMessage | None = None
        self.emptied: Tensor | None = None

    def begin(self, x: Tensor, *, emptied: bool = False) -> PendingMessage:
        """Send `x`, or receive into it, once the message before has arrived.

        Args:
            emptied: give its memory back when it has, though a graph still holds the tensor (Megatron's
                deallocate_output_tensor).
        """
        self.end()
        assert self.line is not None
        self.now, self.emptied = self.line.begin(x.contiguous()), x if emptied else None
        return self.now

    def end(self) -> None:
        """Wait until the last message has arrived."""
        if self.now is not None:
            self.now.wait()
        if self.emptied is not None:
            self.emptied.untyped_storage().resize_(0)
        self.now = self.emptied = None
