"""T5 trains on several ranks as in one process: losses, gradients and weights to 1e-5."""

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

# the two sides of a sample have different lengths
T5 = {"batch__seq_length": 32, "encoder_data__decoder_seq_length": 24, "model__max_position_embeddings": 32}
TP = T5 | {"parallel__tensor_model_parallel_size": 2}
SP = TP | {"parallel__sequence_parallel": True}
PP = T5 | {"parallel__pipeline_model_parallel_size": 2}
SPLIT = PP | {"parallel__pipeline_model_parallel_split_rank": 1}
INTERLEAVED = PP | {"parallel__num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute__recompute_granularity": "full"}
SHARDED = FULL | {"recompute__distribute_saved_activations": True}
SELECTIVE = {"recompute__recompute_granularity": "selective"}
MODULES = SELECTIVE | {"recompute__recompute_modules": ["core_attn", "layernorm", "mlp_act"]}
DROPOUT = {"train__hidden_dropout": 0.1, "train__attention_dropout": 0.1}
UNTIED = {"model__untie_embeddings_and_output_weights": True}
UNPAD = {"encoder_data__unpad_samples": True}
GROUPED = {"model__num_query_groups": 2}


def _trains_alike(
    values: dict[str, Any], world: World, meet: str, folder: Path, *, model: str = "t5"
) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _validates_alike(world: World, meet: str, folder: Path) -> None:
    """A validation gives the loss of one process."""
    values = T5 | {"evaluation__eval_iters": 2, "data__split": "80,20,0", "batch__micro_batch_size": 2}
    losses = []
    for size in (World(), world):
        layout = PP if size.size > 1 else {}
        run = trainer("t5", size, meet if size.size > 1 else "", folder, **values | layout)
        losses.append(evaluate(run, run.valid["validation"]).total)
    run.mesh.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def _resumes(before: dict[str, Any], after: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    resumes("t5", before, after, False, world, meet, folder)


CASES: dict[int, dict[str, Body]] = {
    2: {
        "tensor": partial(_trains_alike, TP),
        "tensor_with_sharded_full_recomputation": partial(_trains_alike, TP | SHARDED),
        "sequence_with_recomputation_and_dropout": partial(_trains_alike, SP | MODULES | DROPOUT),
        "sequence_untied": partial(_trains_alike, SP | UNTIED),
        "data": partial(_trains_alike, T5),
        "zero_1_with_dropout": partial(_trains_alike, T5 | DROPOUT | {"parallel__zero_stage": 1}),
        "zero_3_with_full_recomputation": partial(_trains_alike, T5 | FULL | {"parallel__zero_stage": 3}),
        "pipeline": partial(_trains_alike, PP),
        "pipeline_split_at_the_decoder": partial(_trains_alike, SPLIT | SELECTIVE | DROPOUT),
        "interleaved_pipeline_with_full_recomputation": partial(_trains_alike, INTERLEAVED | FULL | DROPOUT),
        "zero_bubble": partial(_trains_alike, PP | {"parallel__pipeline_schedule": "zero-bubble"}),
        "gpipe": partial(_trains_alike, PP | UNTIED | {"parallel__pipeline_schedule": "gpipe"}),
        "validation_over_pipeline_stages": _validates_alike,
        "relative_positions_in_each_layer": partial(_trains_alike, TP | SELECTIVE, model="umt5"),
        "relative_positions_over_sequence_with_dropout": partial(
            _trains_alike, SP | FULL | DROPOUT, model="t5 1.0"
        ),
        "relative_positions_over_interleaved_pipeline_with_zero_bubble": partial(
            _trains_alike, INTERLEAVED, model="t5 1.0"
        ),
        "relative_positions_with_zero_3": partial(
            _trains_alike, T5 | FULL | {"parallel__zero_stage": 3}, model="t5 1.0"
        ),
        "relative_positions_resume_from_pipeline_on_tensor": partial(resumes, "t5 1.0", SPLIT, TP, False),
        "unpadded_sequence_with_recomputation_and_dropout": partial(
            _trains_alike, SP | FULL | DROPOUT | UNPAD, model="t5 1.0"
        ),
        "unpadded_interleaved_pipeline": partial(_trains_alike, INTERLEAVED | UNPAD | DROPOUT),
        "resumes_from_sequence_on_zero_2": partial(_resumes, SP, T5 | {"parallel__zero_stage": 2}),
        "resumes_from_pipeline_on_tensor": partial(_resumes, SPLIT, TP),
        "resumes_from_zero_1_on_tensor": partial(_resumes, T5 | {"parallel__zero_stage": 1}, TP),
    },
    4: {
        "unpadded_tensor_sequence_pipeline": partial(
            _trains_alike, SP | SPLIT | FULL | UNPAD, model="t5 1.0"
        ),
        "tensor_sequence_pipeline": partial(_trains_alike, SP | SPLIT | DROPOUT),
        "deep_pipeline": partial(_trains_alike, T5 | {"parallel__pipeline_model_parallel_size": 4}),
        "pipeline_zero_2": partial(_trains_alike, INTERLEAVED | {"parallel__zero_stage": 2}),
        "resumes_from_sequence_pipeline_on_zero_3": partial(
            _resumes, SP | PP, T5 | {"parallel__zero_stage": 3}
        ),
        "relative_positions_over_tensor_pipeline": partial(
            _trains_alike, SP | SPLIT | SELECTIVE, model="t5 1.0"
        ),
        "relative_positions_over_deep_pipeline": partial(
            _trains_alike, T5 | {"parallel__pipeline_model_parallel_size": 4}, model="t5 1.0"
        ),
        "relative_positions_over_interleaved_pipeline_with_zero_2": partial(
            _trains_alike, INTERLEAVED | {"parallel__zero_stage": 2}, model="t5 1.0"
        ),
        "sequence_data": partial(_trains_alike, SP | SELECTIVE),
        "tensor_over_replicated_key_heads": partial(
            _trains_alike, SP | GROUPED | {"parallel__tensor_model_parallel_size": 4}
        ),
        "sequence_zero_2": partial(_trains_alike, SP | FULL | DROPOUT | {"parallel__zero_stage": 2}),
        "resumes_from_sequence_zero_1_on_zero_3": partial(
            _resumes, SP | {"parallel__zero_stage": 1}, TP | {"parallel__zero_stage": 3}
        ),
    },
}


SHORT = {
    "relative_positions_over_tensor_pipeline",
    "sequence_with_recomputation_and_dropout",
    "pipeline_split_at_the_decoder",
    "zero_1_with_dropout",
    "unpadded_sequence_with_recomputation_and_dropout",
}


@pytest.mark.parametrize(("ranks", "case"), named_cases(SHORT, CASES))
def test_t5_over_several_ranks_trains_as_in_one_process(outcomes: Outcomes, ranks: int, case: str) -> None:
    assert outcomes.outcome(ranks, case) == ""
