"""BERT trains on several ranks as in one process: losses, gradients and weights to 1e-5."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mega_model.distributed.mesh import World
from mega_train.engine.validation import evaluate
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import resumes, same_as_one_process, trainer
from tests.selection import named_cases

TP = {"parallel__tensor_model_parallel_size": 2}
SP = TP | {"parallel__sequence_parallel": True}
PP = {"parallel__pipeline_model_parallel_size": 2}
INTERLEAVED = PP | {"parallel__num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute__recompute_granularity": "full"}
SELECTIVE = {"recompute__recompute_granularity": "selective"}
NO_HEAD = {"encoder_data__bert_no_binary_head": True}
UNPAD = {"encoder_data__unpad_samples": True}
DROPOUT = {"train__hidden_dropout": 0.1, "train__attention_dropout": 0.1}


def _trains_alike(values: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    same_as_one_process("bert", world, meet, folder, **values)


def _modern_trains_alike(values: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    same_as_one_process("modernbert", world, meet, folder, **NO_HEAD, **values)


def _validates_alike(world: World, meet: str, folder: Path) -> None:
    """A validation gives the losses of one process, over pipeline stages too."""
    values = {"evaluation__eval_iters": 2, "data__split": "80,20,0", "batch__micro_batch_size": 2}
    results = []
    for size in (World(), world):
        layout = PP if size.size > 1 else {}
        run = trainer("bert", size, meet if size.size > 1 else "", folder, **values, **layout)
        losses = evaluate(run, run.valid["validation"])
        results.append([losses.total, *losses.terms.values()])
    run.mesh.destroy()
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[0][0] == pytest.approx(sum(results[0][1:]))


def _resumes(before: dict[str, Any], after: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    resumes("bert", before, after, False, world, meet, folder)


CASES: dict[int, dict[str, Body]] = {
    2: {
        "tensor": partial(_trains_alike, TP),
        "sequence_with_recomputation": partial(_trains_alike, SP | SELECTIVE),
        "pipeline": partial(_trains_alike, PP),
        "interleaved_pipeline_with_dropout": partial(_trains_alike, INTERLEAVED | DROPOUT),
        "data": partial(_trains_alike, {}),
        "zero_1_without_binary_head": partial(_trains_alike, NO_HEAD | {"parallel__zero_stage": 1}),
        "zero_3_with_full_recomputation": partial(_trains_alike, FULL | {"parallel__zero_stage": 3}),
        "unpadded_interleaved_pipeline": partial(_trains_alike, INTERLEAVED | UNPAD | DROPOUT),
        "modern_unpadded_sequence_with_recomputation": partial(
            _modern_trains_alike, SP | SELECTIVE | UNPAD | DROPOUT
        ),
        "modern_tensor": partial(_modern_trains_alike, TP),
        "modern_zero_3_with_full_recomputation": partial(
            _modern_trains_alike, FULL | UNPAD | {"parallel__zero_stage": 3}
        ),
        "validation": _validates_alike,
        "resumes_from_tensor_on_pipeline": partial(_resumes, SP, PP),
        "resumes_from_pipeline_on_zero_2": partial(_resumes, PP, {"parallel__zero_stage": 2}),
    },
    4: {
        "tensor_sequence_pipeline": partial(_trains_alike, SP | PP),
        "sequence_without_binary_head_data": partial(_trains_alike, SP | NO_HEAD | DROPOUT),
        "modern_unpadded_tensor_sequence_pipeline": partial(_modern_trains_alike, SP | PP | UNPAD),
        "modern_unpadded_pipeline_zero_2": partial(
            _modern_trains_alike, INTERLEAVED | UNPAD | {"parallel__zero_stage": 2}
        ),
        "pipeline_zero_2": partial(_trains_alike, INTERLEAVED | FULL | {"parallel__zero_stage": 2}),
        "resumes_from_tensor_pipeline_on_zero_3": partial(
            _resumes, SP | PP, TP | {"parallel__zero_stage": 3}
        ),
    },
}


SHORT = {
    *("sequence_with_recomputation", "interleaved_pipeline_with_dropout", "zero_1_without_binary_head"),
    "modern_unpadded_sequence_with_recomputation",
}


@pytest.mark.parametrize(("ranks", "case"), named_cases(SHORT, CASES))
def test_bert_over_several_ranks_trains_as_in_one_process(outcomes: Outcomes, ranks: int, case: str) -> None:
    assert outcomes.outcome(ranks, case) == ""
