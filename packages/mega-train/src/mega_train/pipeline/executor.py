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

from mega_model.distributed.pipeline_p2p import Line, Lines, Message
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
from mega_train.telemetry.timers import TimerFactory, no_timer

PassKey = tuple[int, int]  # chunk and micro-batch


class PipelineWork(Protocol):
    """What a rank does with a micro-batch."""

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        """The output of the stage that chunk `chunk` is: (T, D) for the next, or on the last stage a loss.

        It is freed once it is sent, so nothing that the backward pass reads may lie in its storage.
        """

    @property
    def boundary(self) -> tuple[int, int]:
        """(T, D) of what crosses between stages, as this rank holds it."""


def execute(
    table: Sequence[Action],
    work: PipelineWork,
    channels: Lines,
    weights: WeightGradients,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_action: Callable[[], object] = lambda: None,
    timer: TimerFactory = no_timer,
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
    executor = _Executor(table, work, channels, weights, dtype, device, timer)
    for action in table:
        executor.run_action(action)
        on_action()
    return executor.finish()


class _Executor:
    """One rank on its way through its table.

    Attributes:
        inputs, outputs: of passes whose backward is still to come, on this rank's side of the graph.
    """

    def __init__(
        self,
        table: Sequence[Action],
        work: PipelineWork,
        channels: Lines,
        weights: WeightGradients,
        dtype: torch.dtype,
        device: torch.device,
        timer: TimerFactory,
    ) -> None:
        self.timer = timer
        self.work = work
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.training = any(isinstance(action, Backward | BackwardInput) for action in table)
        self.sent_outputs = {(a.chunk, a.micro) for a in table if isinstance(a, SendOutput)}
        self.inputs: dict[PassKey, Tensor] = {}
        self.outputs: dict[PassKey, Tensor] = {}
        self.losses: list[Tensor] = []
        self.output = _ChannelEnd(channels.output)
        self.input_gradient = _ChannelEnd(channels.input_gradient)
        self.input = _ChannelEnd(channels.input)
        self.output_gradient = _ChannelEnd(channels.output_gradient)
        self.pending: dict[Action, Message] = {}

    def run_action(self, action: Action) -> None:
        key = action.chunk, action.micro
        match action:
            case ReceiveInput():
                self.pending[action] = self.input.begin(self._empty_buffer())
            case ReceiveGradient():
                self.pending[action] = self.output_gradient.begin(self._empty_buffer())
            case SendOutput():
                output = self.outputs[key] if self.training else self.outputs.pop(key)
                self.output.begin(output.detach(), free_after_send=self.training)
            case SendGradient():
                gradient = self.inputs.pop(key).grad
                assert gradient is not None
                self.input_gradient.begin(gradient)
            case Forward():
                self._forward(key)
            case Backward():
                self._backward(key)
            case BackwardInput():
                with self.weights.deferred(key):
                    self._backward(key)
            case BackwardWeight():
                with self.timer("backward-compute"):
                    self.weights.run(key)

    def finish(self) -> list[Tensor]:
        """Wait until all is sent; the losses."""
        self.output.wait()
        self.input_gradient.wait()
        return self.losses

    def _empty_buffer(self) -> Tensor:
        return torch.empty(self.work.boundary, dtype=self.dtype, device=self.device)

    def _forward(self, key: PassKey) -> None:
        message = self.pending.pop(ReceiveInput(*key), None)
        received = None if message is None else self._wait_message(message, "forward-recv")
        if received is not None and self.training:
            self.inputs[key] = received.requires_grad_()
        with self.timer("forward-compute"):
            output = self.work.forward(*key, received)
        if key not in self.sent_outputs:
            self.losses.append(output.detach())
        if self.training or key in self.sent_outputs:
            self.outputs[key] = output

    def _backward(self, key: PassKey) -> None:
        message = self.pending.pop(ReceiveGradient(*key), None)
        gradient = None if message is None else self._wait_message(message, "backward-recv")
        with self.timer("backward-compute"):
            self.outputs.pop(key).backward(gradient)

    def _wait_message(self, message: Message, phase: str) -> Tensor:
        with self.timer(phase):
            return message.wait()


class _ChannelEnd:
    """An end of a line on which one message at a time is on its way."""

    def __init__(self, channel: Line | None) -> None:
        self.channel = channel
        self.in_flight: Message | None = None
        self.freed_after_send: Tensor | None = None

    def begin(self, x: Tensor, *, free_after_send: bool = False) -> Message:
        """Send `x`, or receive into it, once the message before has arrived.

        Args:
            emptied: give its memory back when it has, though a graph still holds the tensor (Megatron's
                deallocate_output_tensor).
        """
        self.wait()
        assert self.channel is not None
        self.in_flight, self.freed_after_send = (
            self.channel.begin(x.contiguous()),
            x if free_after_send else None,
        )
        return self.in_flight

    def wait(self) -> None:
        """Wait until the last message has arrived."""
        if self.in_flight is not None:
            self.in_flight.wait()
        if self.freed_after_send is not None:
            self.freed_after_send.untyped_storage().resize_(0)
        self.in_flight = self.freed_after_send = None
