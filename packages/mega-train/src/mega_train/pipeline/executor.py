"""Execute one rank's table of a pipeline schedule.

Messages are transferred while the rank computes. The table defines when a send or receive starts. The rank
waits for it when it needs the result: a pass for its input, and a channel
(`mega_model.distributed.pipeline_p2p`) for its previous message, so that a channel carries one message at a
time. Both ends of a channel agree on the order of its messages, since both tables come from one order of
passes; `tests/pipeline_simulator.py` proves it of a schedule, on channels without a buffer. On a GPU a wait
blocks the compute stream and not the CPU.
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
from mega_train.telemetry.timers import TimerFactory, no_timer

PassKey = tuple[int, int]  # chunk and micro-batch


class PipelineWork(Protocol):
    """The computation of one micro-batch on a rank."""

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        """Return the output of stage `chunk`: (T, D) for the next stage, or on the last stage a loss.

        Its storage is freed once it is sent, so nothing that the backward pass reads may share it.
        """

    def boundary(self, micro: int) -> tuple[int, int]:
        """Return the shape (T, D) of this rank's activations between stages."""


def execute(
    table: Sequence[Action],
    work: PipelineWork,
    channels: PipelineChannels,
    weights: WeightGradients,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_action: Callable[[], object] = lambda: None,
    timer: TimerFactory = no_timer,
) -> list[Tensor]:
    """Execute the table.

    Args:
        weights: accumulates the gradients of weights; defers them if the table does.
        on_action: called after every action.
        timer: returns a context that times a phase by name: a pass, or waiting for a message.

    Returns:
        on the rank of the last stage the detached losses in the order of their micro-batches; elsewhere an
        empty list.
    """
    executor = _Executor(table, work, channels, weights, dtype, device, timer)
    for action in table:
        executor.run_action(action)
        on_action()
    return executor.finish()


class _Executor:
    """Execution of one rank's table.

    Attributes:
        inputs, outputs: of passes whose backward is pending, on this rank's side of the graph.
    """

    def __init__(
        self,
        table: Sequence[Action],
        work: PipelineWork,
        channels: PipelineChannels,
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
        self.pending: dict[Action, PendingMessage] = {}

    def run_action(self, action: Action) -> None:
        key = action.chunk, action.micro
        match action:
            case ReceiveInput():
                self.pending[action] = self.input.begin(self._empty_buffer(action.micro))
            case ReceiveGradient():
                self.pending[action] = self.output_gradient.begin(self._empty_buffer(action.micro))
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
                with self.weights.defer(key):
                    self._backward(key)
            case BackwardWeight():
                with self.timer("backward-compute"):
                    self.weights.run_deferred(key)

    def finish(self) -> list[Tensor]:
        """Wait for all sends; return the losses."""
        self.output.wait()
        self.input_gradient.wait()
        return self.losses

    def _empty_buffer(self, micro: int) -> Tensor:
        return torch.empty(self.work.boundary(micro), dtype=self.dtype, device=self.device)

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

    def _wait_message(self, message: PendingMessage, phase: str) -> Tensor:
        with self.timer(phase):
            return message.wait()


class _ChannelEnd:
    """One end of a channel, with at most one message in flight."""

    def __init__(self, channel: P2PChannel | None) -> None:
        self.channel = channel
        self.in_flight: PendingMessage | None = None
        self.freed_after_send: Tensor | None = None

    def begin(self, x: Tensor, *, free_after_send: bool = False) -> PendingMessage:
        """Start to send `x`, or to receive into it, once the previous message has arrived.

        Args:
            free_after_send: free its memory afterwards although a graph still holds the tensor (Megatron's
                deallocate_output_tensor).
        """
        self.wait()
        assert self.channel is not None
        self.in_flight = self.channel.begin(x.contiguous())
        self.freed_after_send = x if free_after_send else None
        return self.in_flight

    def wait(self) -> None:
        """Wait until the last message has arrived."""
        if self.in_flight is not None:
            self.in_flight.wait()
        if self.freed_after_send is not None:
            self.freed_after_send.untyped_storage().resize_(0)
        self.in_flight = self.freed_after_send = None
