"""Every schedule and layer assignment trains like one process, and bitwise like each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mega_model.distributed.mesh import Mesh, World
from mega_schema.parallel_layout import Layout
from mega_train.engine.validation import evaluate
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import same_as_one_process, steps, trainer
from tests.selection import every_nth, requested_values

Values = dict[str, object]
PP2, PP4, TP2 = (
    {"parallel__pipeline_model_parallel_size": 2},
    {"parallel__pipeline_model_parallel_size": 4},
    {"parallel__tensor_model_parallel_size": 2},
)
SP = {"parallel__sequence_parallel": True}
VP2 = {"parallel__num_virtual_stages_per_pipeline_rank": 2}
GPIPE = {"parallel__pipeline_schedule": "gpipe"}
ZERO_BUBBLE = {"parallel__pipeline_schedule": "zero-bubble"}
ENDS_COUNT = {
    "parallel__account_for_embedding_in_pipeline_split": True,
    "parallel__account_for_loss_in_pipeline_split": True,
}
OVERLAP = {
    "parallel__overlap_grad_reduce": True,
    "parallel__overlap_param_gather": True,
    "parallel__ddp_bucket_size": 3000,
}
AGAIN = {
    "recompute__recompute_granularity": "full",
    "train__hidden_dropout": 0.1,
    "train__attention_dropout": 0.1,
}
LAYERS_8 = {"model__num_layers": 8}


def _cut(model: str, **values: object) -> Body:
    return partial(_compare, model, values)


def _compare(model: str, values: Values, world: World, meet: str, folder: Path) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _bitwise(model: str, layouts: list[Values], world: World, meet: str, folder: Path) -> None:
    """Where only the order of passes or the place of layers differs, no weight differs by a bit.

    Clipping is off: the norm is a sum over ranks, whose order follows the place of layers.
    """
    first: dict[str, torch.Tensor] = {}
    for number, values in enumerate(layouts):
        run = trainer(model, world, f"{meet}{number}", folder, optimizer__clip_grad=0.0, **values)
        losses = steps(run, 3)
        own_weights = {row.tied_to or row.name: weight.detach() for row, weight in run.params}
        torch.save((losses, own_weights), folder / f"{number}-{world.rank}.pt")
        run.mesh.barrier()
        whole: dict[str, torch.Tensor] = {}
        for rank in range(world.size):
            expected, share = torch.load(folder / f"{number}-{rank}.pt")
            assert expected == losses
            whole |= share
        run.mesh.destroy()
        first = first or whole
        assert whole.keys() == first.keys()
        for name, weight in whole.items():
            assert torch.equal(weight, first[name]), f"{values}: {name}"


def _validates(values: Values, world: World, meet: str, folder: Path) -> None:
    """Validation passes through all stages, and training goes on after it."""
    evaluation = {"evaluation__eval_iters": 2, "data__split": "80,20,0"}
    run = trainer("gpt", world, meet, folder, **evaluation, **values)
    alone = trainer("gpt", World(), meet, folder, **evaluation)
    for _ in range(2):
        actual, expected = (evaluate(trainer, trainer.valid["validation"]) for trainer in (run, alone))
        assert actual == pytest.approx(expected, abs=1e-5)
        assert steps(run, 1) == pytest.approx(steps(alone, 1), abs=1e-5)
    run.mesh.destroy()


def _resumes(before: Values, after: Values, world: World, meet: str, folder: Path) -> None:
    """Parameters keep their names, so a checkpoint loads however the layers are split."""
    run = trainer("gpt", world, meet + "a", folder, checkpoint__save=str(folder / "run"), **before)
    steps(run, 2)
    run.save()
    run.saver.finish()
    on = steps(run, 2)
    run.mesh.destroy()
    resumed = trainer("gpt", world, meet + "b", folder, load_from=folder / "run", **after)
    assert steps(resumed, 2) == pytest.approx(on, abs=1e-5)
    resumed.mesh.destroy()


def _frees_what_was_sent(world: World, meet: str, folder: Path) -> None:
    """A stage's output is kept for its graph alone: its memory is given back once it was received."""
    run = trainer("gpt", world, meet, folder, **PP2, **VP2)
    storages: list[torch.UntypedStorage] = []

    def watch(_: object, __: object, output: torch.Tensor) -> None:
        storages.append(output.untyped_storage())

    for model in run.models:
        model.register_forward_hook(watch)
    steps(run, 1)
    sent = sum(not model.stage.is_last for model in run.models) * run.config.accumulation_steps
    assert sum(storage.nbytes() == 0 for storage in storages) == sent
    run.mesh.destroy()


def _line_gives_up(world: World, meet: str, folder: Path) -> None:
    """A rank that waits for a message that never comes gives up after the minutes asked for."""
    mesh = Mesh.join(Layout(pp=2), world, init_method=meet, timeout_minutes=1 / 60)
    if world.rank == 1:
        assert mesh.channels.input is not None
        with pytest.raises(RuntimeError, match="Timed out"):
            mesh.channels.input.begin(torch.empty(1)).wait()
        (folder / "done").touch()
    while not (folder / "done").exists():
        time.sleep(0.05)
    mesh.destroy()


CASES: dict[int, dict[str, Body]] = {
    2: {
        "interleaved_gpt_tied": _cut("gpt", **PP2, **VP2),
        "interleaved_with_rounds_that_do_not_divide_llama": _cut(
            "llama", batch__global_batch_size=5, parallel__num_layers_per_virtual_pipeline_stage=1, **PP2
        ),
        "interleaved_with_one_micro_batch": _cut("gpt", batch__micro_batch_size=8, **PP2, **VP2),
        "interleaved_uneven_gpt": _cut("gpt", model__num_layers=7, **PP2, **VP2),
        "gpipe_gpt": _cut("gpt", **PP2, **GPIPE),
        "zero_bubble_gpt": _cut("gpt", **PP2, **ZERO_BUBBLE),
        "zero_bubble_over_chunks_llama": _cut("llama", **PP2, **VP2, **ZERO_BUBBLE),
        "first_stage_of_one_layer_llama": _cut("llama", parallel__decoder_first_pipeline_num_layers=1, **PP2),
        "schedules_and_dealings_are_bitwise_gpt": partial(
            _bitwise,
            "gpt",
            [
                PP2,
                PP2 | GPIPE,
                PP2 | ZERO_BUBBLE,
                PP2 | VP2,
                PP2 | VP2 | GPIPE,
                PP2 | VP2 | ZERO_BUBBLE,
                PP2 | {"parallel__decoder_last_pipeline_num_layers": 1},
                PP2 | ENDS_COUNT,
            ],
        ),
        "validation_over_chunks": partial(_validates, PP2 | VP2),
        "resume_from_chunks_on_stages": partial(_resumes, PP2 | VP2, PP2),
        "resume_from_stages_on_chunks": partial(_resumes, PP2, PP2 | VP2 | ZERO_BUBBLE),
        "what_was_sent_is_freed": _frees_what_was_sent,
        "a_rank_that_waits_for_a_message_in_vain_gives_up": _line_gives_up,
    },
    4: {
        "interleaved_over_4_gpt": _cut("gpt", **LAYERS_8, **PP4, **VP2),
        "zero_bubble_over_4_llama": _cut("llama", **PP4, **ZERO_BUBBLE),
        "fewer_micro_batches_than_ranks_llama": _cut(
            "llama", batch__global_batch_size=3, **LAYERS_8, **PP4, **VP2, **ZERO_BUBBLE
        ),
        "gpipe_with_embedding_and_head_alone_gpt": _cut(
            "gpt", model__num_layers=2, **PP4, **GPIPE, **ENDS_COUNT
        ),
        "interleaved_data_2_gpt": _cut("gpt", **PP2, **VP2, batch__micro_batch_size=2),
        "interleaved_zero_1_overlapped_gpt": _cut("gpt", **PP2, **VP2, **OVERLAP, parallel__zero_stage=1),
        "zero_bubble_over_chunks_zero_2_recomputed_dropout_gpt": _cut(
            "gpt", **PP2, **VP2, **ZERO_BUBBLE, **OVERLAP, **AGAIN, parallel__zero_stage=2
        ),
        "interleaved_zero_3_llama": _cut("llama", **PP2, **VP2, parallel__zero_stage=3),
        "interleaved_context_2_llama": _cut("llama", **PP2, **VP2, parallel__context_parallel_size=2),
        "interleaved_tensor_2_sequence_gpt": _cut("gpt", **PP2, **VP2, **TP2, **SP),
        "zero_bubble_tensor_2_sequence_llama": _cut("llama", **PP2, **ZERO_BUBBLE, **TP2, **SP),
    },
}


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], str]:
    return Outcomes(CASES, tmp_path_factory, requested_values(request, "case")).outcome


ALL = [(ranks, case) for ranks in CASES for case in CASES[ranks]]


@pytest.mark.parametrize(("ranks", "case"), every_nth(3, ALL))
def test_the_pipeline_trains_as_one_process_does(
    outcome: Callable[[int, str], str], ranks: int, case: str
) -> None:
    assert outcome(ranks, case) == ""
