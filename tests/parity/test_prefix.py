"""Prefix language models train on several ranks as in one process: losses, gradients and weights to 1e-5."""

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

PREFIX = {"objective__prefix_lm": True}
TARGETS = PREFIX | {
    "objective__loss_on_targets_only": True,
    "objective__reweight_loss_based_on_position_frequency": True,
}
DOCUMENTS = TARGETS | {
    "data__reset_position_ids": True,
    "data__reset_attention_mask": True,
    "data__eod_mask_loss": True,
}
PROMPTS = PREFIX | {"data__sft": True}
SPANS = PREFIX | {"objective__noise_density": 0.3, "objective__mean_noise_span_length": 2.0}
TP = {"parallel__tensor_model_parallel_size": 2}
SP = TP | {"parallel__sequence_parallel": True}
PP = {"parallel__pipeline_model_parallel_size": 2}
INTERLEAVED = PP | {"parallel__num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute__recompute_granularity": "full"}
SELECTIVE = {"recompute__recompute_granularity": "selective"}
DROPOUT = {"train__hidden_dropout": 0.1, "train__attention_dropout": 0.1}
ALIBI = {"model__position_embedding_type": "alibi"}


def _trains_alike(model: str, values: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _validates_alike(world: World, meet: str, folder: Path) -> None:
    """A validation gives the loss of one process, over pipeline stages too."""
    values = {"evaluation__eval_iters": 2, "data__split": "80,20,0", "batch__micro_batch_size": 2} | DOCUMENTS
    losses = []
    for size in (World(), world):
        layout = PP if size.size > 1 else {}
        run = trainer("gpt", size, meet if size.size > 1 else "", folder, **values, **layout)
        losses.append(evaluate(run, run.valid["validation"]).total)
    run.mesh.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def _resumes(before: dict[str, Any], after: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    resumes("gpt", before, after, False, world, meet, folder)


CASES: dict[int, dict[str, Body]] = {
    2: {
        "sequence_with_recomputation": partial(_trains_alike, "gpt", DOCUMENTS | SP | SELECTIVE),
        "interleaved_pipeline_with_dropout": partial(_trains_alike, "gpt", TARGETS | INTERLEAVED | DROPOUT),
        "tensor_of_a_llama": partial(_trains_alike, "llama", PREFIX | TP),
        "pipeline_of_alibi": partial(_trains_alike, "gpt", DOCUMENTS | ALIBI | PP),
        "pipeline_of_spans": partial(_trains_alike, "llama", SPANS | PP),
        "data_with_prompts": partial(_trains_alike, "gpt", PROMPTS),
        "zero_1_with_a_loss_per_token": partial(
            _trains_alike,
            "gpt",
            TARGETS | {"parallel__zero_stage": 1, "train__calculate_per_token_loss": True},
        ),
        "zero_3_with_full_recomputation": partial(
            _trains_alike, "gpt", DOCUMENTS | FULL | {"parallel__zero_stage": 3}
        ),
        "validation": _validates_alike,
        "resumes_from_sequence_on_pipeline": partial(_resumes, DOCUMENTS | SP, DOCUMENTS | PP),
    },
    4: {
        "tensor_sequence_pipeline": partial(_trains_alike, "gpt", DOCUMENTS | SP | PP),
        "spans_over_tensor_sequence_pipeline": partial(
            _trains_alike, "gpt", SPANS | SP | INTERLEAVED | SELECTIVE | DROPOUT
        ),
        "spans_resume_from_tensor_on_zero_2": partial(
            _resumes, SPANS | SP | PP, SPANS | TP | {"parallel__zero_stage": 2}
        ),
        "interleaved_pipeline_zero_2": partial(
            _trains_alike, "llama", TARGETS | INTERLEAVED | FULL | {"parallel__zero_stage": 2}
        ),
    },
}


SHORT = {"sequence_with_recomputation", "interleaved_pipeline_with_dropout"}


@pytest.mark.parametrize(("ranks", "case"), named_cases(SHORT, CASES))
def test_prefixes_over_several_ranks_train_as_in_one_process(
    outcomes: Outcomes, ranks: int, case: str
) -> None:
    assert outcomes.outcome(ranks, case) == ""
