"""Pipeline schedules as tables: for every stage, the list of what it does. Pure functions of integers.

A table is checked, drawn and counted without a process; one small executor (`pipeline`) runs any of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass of a micro-batch."""

    micro: int


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of a micro-batch."""

    micro: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is sent and received at once, as micro-batch numbers; None where nothing is.

    Attributes:
        send_output: this stage's output, to the next stage.
        receive_input: the stage before's output.
        send_gradient: the gradient of this stage's input, to the stage before.
        receive_gradient: the gradient of this stage's output, from the next stage.
    """

    send_output: int | None = None
    receive_input: int | None = None
    send_gradient: int | None = None
    receive_gradient: int | None = None


Action = Forward | Backward | Exchange


def one_forward_one_backward(stages: int, micros: int, stage: int) -> list[Action]:
    """1F1B (arXiv:2104.04473 §2.2): forwards until the pipeline is full, then in turn, then drain.

    At most `stages - stage` micro-batches are alive on a stage, whatever their number.
    """
    first, last = stage == 0, stage == stages - 1
    fill = min(stages - stage - 1, micros)
    table: list[Action] = []

    def exchange(
        *,
        output: int | None = None,
        inputs: int | None = None,
        grad: int | None = None,
        back: int | None = None,
    ) -> None:
        step = Exchange(
            None if last else output,
            None if first else inputs,
            None if first else grad,
            None if last else back,
        )
        if step != Exchange():
            table.append(step)

    exchange(inputs=0)
    for micro in range(fill):
        table.append(Forward(micro))
        exchange(output=micro)
        exchange(inputs=micro + 1 if micro + 1 < micros else None)
    for done in range(micros - fill):
        ahead = done + fill
        table.append(Forward(ahead))
        exchange(output=ahead, back=done)
        table.append(Backward(done))
        exchange(grad=done, inputs=ahead + 1 if ahead + 1 < micros else None)
    for micro in range(micros - fill, micros):
        exchange(back=micro)
        table.append(Backward(micro))
        exchange(grad=micro)
    return table


def forward_only(stages: int, micros: int, stage: int) -> list[Action]:
    """Every micro-batch through the stages once, as validation does."""
    table: list[Action] = []
    for micro in range(micros):
        if stage > 0:
            table.append(Exchange(receive_input=micro))
        table.append(Forward(micro))
        if stage < stages - 1:
            table.append(Exchange(send_output=micro))
    return table
