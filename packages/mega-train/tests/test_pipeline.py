"""The executor returns the results of a table, and frees memory early."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_model.distributed.pipeline_p2p import PipelineChannels
from mega_model.weight_gradients import WeightGradients
from mega_train.pipeline.executor import execute
from mega_train.pipeline.schedules import PipelineShape, Schedule, forward_only, one_forward_one_backward


class Scale:
    """A stage of one weight: the loss of micro-batch m is weight · (m + 1)."""

    boundary = (1, 1)

    def __init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        assert received is None
        return self.weight * (micro + 1)


def _run(schedule: Schedule, work: Scale, micros: int) -> list[Tensor]:
    table = schedule(PipelineShape(1, 1, micros), 0)
    return execute(
        table, work, PipelineChannels(), WeightGradients(), dtype=torch.float32, device=torch.device("cpu")
    )


def test_one_stage_gives_the_losses_in_order_and_adds_up_the_gradients() -> None:
    work = Scale()
    losses = _run(one_forward_one_backward, work, 4)
    assert [float(loss) for loss in losses] == [1, 2, 3, 4]
    assert not any(loss.requires_grad for loss in losses)
    assert work.weight.grad is not None
    assert float(work.weight.grad) == 10


def test_every_action_done_is_told() -> None:
    table, heartbeats = one_forward_one_backward(PipelineShape(1, 1, 3), 0), list[None]()
    cpu = torch.device("cpu")
    execute(
        table,
        Scale(),
        PipelineChannels(),
        WeightGradients(),
        dtype=torch.float32,
        device=cpu,
        on_action=lambda: heartbeats.append(None),
    )
    assert len(heartbeats) == len(table) == 6


def test_forward_only_gives_the_losses_and_no_gradient() -> None:
    work = Scale()
    assert [float(loss) for loss in _run(forward_only, work, 3)] == [1, 2, 3]
    assert work.weight.grad is None
