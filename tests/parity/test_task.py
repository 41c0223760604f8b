"""A task is learnt and evaluated on several ranks as in one process: losses, gradients, weights, logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_model.distributed.mesh import World
from mega_train.data.task_data import TaskReader
from mega_train.engine.trainer import Trainer
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import TOLERANCE, same_as_one_process, trainer
from tests.selection import named_cases

TP = {"parallel__tensor_model_parallel_size": 2}
SP = TP | {"parallel__sequence_parallel": True}
PP = {"parallel__pipeline_model_parallel_size": 2}
INTERLEAVED = PP | {"parallel__num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute__recompute_granularity": "full"}
DROPOUT = {"train__hidden_dropout": 0.1, "train__attention_dropout": 0.1}
WEIGHTS = {"task__class_weights": ("1", "2", "5")}


def _trains_alike(
    values: dict[str, Any], world: World, meet: str, folder: Path, model: str = "classify"
) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _evaluates_alike(
    layout: dict[str, Any], world: World, meet: str, folder: Path, model: str = "classify"
) -> None:
    """All ranks have the logits of one process, in the order of the file."""
    results = []
    for size in (World(), world):
        values = layout if size.size > 1 else {}
        run = trainer(model, size, meet if size.size > 1 else "", folder, **values)
        results.append(_logits(run))
    run.mesh.destroy()
    torch.testing.assert_close(results[1], results[0], **TOLERANCE)
    assert results[0].std() > 1e-3


@torch.no_grad()
def _logits(run: Trainer) -> torch.Tensor:
    reader = run.valid["dev"]
    assert isinstance(reader, TaskReader)
    firsts = range(0, len(reader), reader.batch)
    logits = [run.forward_backward.task_logits(reader, first, reader.batch, 16) for first in firsts]
    return torch.cat(logits)[: len(reader.samples)]


CASES: dict[int, dict[str, Body]] = {
    2: {
        "tensor": partial(_trains_alike, TP | WEIGHTS),
        "sequence_with_dropout": partial(_trains_alike, SP | DROPOUT | WEIGHTS),
        "pipeline": partial(_trains_alike, PP),
        "interleaved_pipeline_with_dropout": partial(_trains_alike, INTERLEAVED | DROPOUT),
        "data_with_class_weights": partial(_trains_alike, WEIGHTS),
        "choices_over_sequence_with_dropout": partial(_trains_alike, SP | DROPOUT, model="race"),
        "choices_over_pipeline": partial(_trains_alike, PP | DROPOUT, model="race"),
        "choices_over_data": partial(_trains_alike, {}, model="race"),
        "spans_over_sequence_with_dropout": partial(_trains_alike, SP | DROPOUT, model="squad"),
        "spans_over_tensor": partial(_trains_alike, TP, model="squad"),
        "spans_over_pipeline": partial(_trains_alike, PP | DROPOUT, model="squad"),
        "spans_over_interleaved_pipeline": partial(_trains_alike, INTERLEAVED, model="squad"),
        "spans_over_data_with_zero_2": partial(_trains_alike, {"parallel__zero_stage": 2}, model="squad"),
        "spans_with_zero_3_and_full_recomputation": partial(
            _trains_alike, FULL | {"parallel__zero_stage": 3}, model="squad"
        ),
        "tags_over_sequence_with_dropout": partial(_trains_alike, SP | DROPOUT, model="tag"),
        "tags_over_pipeline_with_dropout": partial(_trains_alike, PP | DROPOUT, model="tag"),
        "tags_over_data_with_zero_2": partial(_trains_alike, {"parallel__zero_stage": 2}, model="tag"),
        "tags_validation_over_data": partial(_evaluates_alike, {}, model="tag"),
        "spans_validation_over_data": partial(_evaluates_alike, {}, model="squad"),
        "zero_1": partial(_trains_alike, {"parallel__zero_stage": 1}),
        "zero_3_with_full_recomputation": partial(_trains_alike, FULL | {"parallel__zero_stage": 3}),
        "validation_over_data": partial(_evaluates_alike, {}),
        "validation_over_pipeline": partial(_evaluates_alike, PP),
    },
    4: {
        "tensor_sequence_pipeline": partial(_trains_alike, SP | PP | WEIGHTS),
        "sequence_data": partial(_trains_alike, SP | DROPOUT | WEIGHTS),
        "tags_over_sequence_and_pipeline": partial(_trains_alike, SP | PP | DROPOUT, model="tag"),
        "spans_over_sequence_and_pipeline": partial(_trains_alike, SP | PP | DROPOUT, model="squad"),
        "spans_validation_over_tensor_and_pipeline": partial(_evaluates_alike, SP | PP, model="squad"),
        "validation_over_tensor_and_data": partial(_evaluates_alike, SP),
    },
}
SHORT = {
    "sequence_with_dropout",
    "choices_over_pipeline",
    "spans_over_sequence_with_dropout",
    "data_with_class_weights",
    "validation_over_pipeline",
}


@pytest.mark.parametrize(("ranks", "case"), named_cases(SHORT, CASES))
def test_a_task_over_several_ranks_is_learnt_as_in_one_process(
    outcomes: Outcomes, ranks: int, case: str
) -> None:
    assert outcomes.outcome(ranks, case) == ""
