"""All ZeRO stages and overlaps train like one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.operations.reshard import reshard
from mega_model.distributed.mesh import World
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_train.engine.trainer import Trainer
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import resumes, same_as_one_process, steps, storages, trainer
from tests.selection import one_of_each_kind, requested_values, without_digits

SMALL = {"parallel__ddp_bucket_size": 3000}  # some ten buckets, ragged ones among them
OVERLAP = {"parallel__overlap_grad_reduce": True}
GATHER = OVERLAP | {"parallel__overlap_param_gather": True}
TP2 = {"parallel__tensor_model_parallel_size": 2}
ONE_MICRO = {"batch__micro_batch_size": 4, "optimizer__clip_grad": 0.0}
PP2 = {"parallel__pipeline_model_parallel_size": 2}
FULL = {"recompute__recompute_granularity": "full", "recompute__recompute_num_layers": 2}
SELECTIVE = {
    "recompute__recompute_granularity": "selective",
    "recompute__recompute_modules": "core_attn layernorm mlp_act",
}
BUBBLE = {"parallel__pipeline_schedule": "zero-bubble"}
VIRTUAL = {"parallel__num_layers_per_virtual_pipeline_stage": 1}
DROPOUT = {"train__hidden_dropout": 0.1, "train__attention_dropout": 0.1}
# On CPUs without AVX-512, torch's fused AdamW rounds the elements after the last whole vector otherwise.
# Stages cut the parameters at other elements, and weights then differ in the last bit of float16.
HAS_EXACT_ADAMW = torch.backends.cpu.get_cpu_capability() == "AVX512"
SP = TP2 | {"parallel__sequence_parallel": True}


def _zero(stage: int) -> dict[str, object]:
    return {"parallel__zero_stage": stage}


def _same_training(model: str, *values: dict[str, object]) -> Body:
    return partial(_compare, model, _merge(*values))


def _merge(*values: dict[str, object]) -> dict[str, object]:
    return {key: value for part in values for key, value in part.items()}


def _compare(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _alike(model: str, options: tuple[dict[str, object], ...], world: World, meet: str, folder: Path) -> None:
    """Runs that differ in what overlaps or in what is cut take bitwise the same steps, if AdamW does."""
    seen = []
    for number, values in enumerate(options):
        run = trainer(model, world, f"{meet}{number}", folder, **values)
        # stages measure the gradient in other orders: then its norm is the same but for the last bits
        both = [run.step(run.state.lr) for _ in range(4)]
        losses = [loss for loss, _ in both] if values.get("optimizer__clip_grad") == 0.0 else both
        run.sharding.wait_all_gather()
        weights = [weight.detach().clone() for _, weight in run.params]
        run.mesh.destroy()
        seen.append((losses, weights))
    (first, weights), *others = seen
    for losses, theirs in others:
        if HAS_EXACT_ADAMW:
            assert losses == first
            assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
        else:
            np.testing.assert_allclose(losses, first, rtol=1e-5)
            for a, b in zip(weights, theirs, strict=True):
                torch.testing.assert_close(b, a, rtol=2e-3, atol=5e-5)


def _same_files(world: World, meet: str, folder: Path) -> None:
    """What stages write is the same run, number for number."""
    saved = []
    for stage in range(4):
        where = folder / f"stage{stage}"
        run = trainer(
            "gpt",
            world,
            f"{meet}{stage}",
            folder,
            checkpoint__save=str(where),
            batch__micro_batch_size=2,
            **_zero(stage),
            **SMALL,
        )
        steps(run, 2)
        run.save()
        run.saver.finish()
        run.mesh.destroy()
        saved.append(Checkpoint.open(where))
    for number, checkpoint in enumerate(saved if world.rank == 0 else ()):
        verify(checkpoint)
        cut = reshard(checkpoint, folder / f"resharded{number}", Layout(tp=2))
        verify(Checkpoint.open(cut))
    first, *others = saved
    for other_files in others:
        assert {space: set(tensors) for space, tensors in other_files.tensors.items()} == {
            space: set(tensors) for space, tensors in first.tensors.items()
        }
        for space, tensors in first.tensors.items():
            for name, tensor in tensors.items():
                whole = Slab((0,) * len(tensor.shape), tensor.shape, (0,) * len(tensor.shape))
                np.testing.assert_allclose(
                    other_files.read(space, name, whole),
                    first.read(space, name, whole),
                    rtol=1e-5,
                    atol=1e-6,
                    err_msg=f"{space} {name}",
                )


def _spoil(run: Trainer, value: float, *, on: int) -> None:
    """Let one rank's own part of the batch give gradients that are not finite, from a norm of layer 1 on."""

    def spoil(module: nn.Module, arguments: object, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * value)

    if run.mesh.rank == on:
        run.models[0].get_submodule("layers.1.attn_norm").register_forward_hook(spoil)


def _stops(stage: int, named: str, world: World, meet: str, folder: Path) -> None:
    """All ranks see what one alone computed, before any of them updates."""
    run = trainer("gpt", world, meet, folder, **_zero(stage), **SMALL)
    steps(run, 1)
    before = [main.clone() for main in run.sharding.main_params]
    _spoil(run, float("nan"), on=1)
    try:
        line = f"took {len(steps(run, 1))} step"
    except MegaError as error:
        line = str(error)
    run.mesh.destroy()
    assert f"gradient norm nan, first in layers.1.attn_norm.bias{named}, wanted" in line
    assert line.startswith("iteration 2: loss or gradient is not finite: found loss 4.")
    assert all(torch.equal(a, b) for a, b in zip(before, run.sharding.main_params, strict=True))


def _skips(stage: int, world: World, meet: str, folder: Path) -> None:
    """A gradient that overflows on one rank is skipped on all, and the scale is theirs together."""
    run = trainer("gpt", world, meet, folder, train__fp16=True, train__loss_scale_window=2, **_zero(stage))
    run.loss_scaler.value, run.loss_scaler.hysteresis_tracker = 1024.0, 1
    steps(run, 2)
    assert (run.loss_scaler.value, run.state.skipped_samples) == (2048.0, 0)
    _spoil(run, float("inf"), on=1)
    steps(run, 1)
    assert (run.loss_scaler.value, run.state.skipped_samples, run.optimizer.steps, run.state.iteration) == (
        2048.0,
        8,
        2,
        3,
    )
    steps(run, 1)
    assert (run.loss_scaler.value, run.state.skipped_samples) == (1024.0, 16)
    run.mesh.destroy()


def _holds(stage: int, bf16: bool, world: World, meet: str, folder: Path) -> None:
    """Bytes between two steps: weights, gradients and optimizer state, to the padding and the step counts."""
    before = storages()
    sizes = {"model__hidden_size": 64, "batch__seq_length": 64, "train__bf16": bf16}
    run = trainer("gpt", world, meet, folder, **sizes, **_zero(stage))
    steps(run, 2)
    run.grad_sync.shards = ()
    held_bytes = sum(size for place, size in storages().items() if place not in before)
    parameters = sum(row.size for row in run.rt.table.values() if not row.tied_to)
    parameters += (-(-101 // 8) * 8 - 101) * 64  # the vocabulary's padding
    weight, gradient, state = (2, 4, 12) if bf16 else (4, 4, 8)
    d = world.size
    expected = {
        0: weight + gradient + state,  # 18, or 16
        1: weight + gradient + state / d,  # 6 + 12 / d, or 8 + 8 / d
        2: weight + (gradient + state) / d,
        3: 16 / d,  # float32 weights are all there are
    }[stage] * parameters
    run.mesh.destroy()
    scalars = 16 * len(run.params) + 256
    assert expected <= held_bytes <= expected + scalars + 64 * d * (weight + gradient + state), (
        held_bytes / parameters
    )


def _check_rounded(world: World, meet: str, folder: Path) -> None:
    """Gradients exchanged in bfloat16 give the same steps on stages 0 to 2, and are near those in float32."""
    seen = {}
    for stage, rounded in ((0, False), (0, True), (1, True), (2, True), (3, True)):
        values = _merge(_zero(stage), SMALL, ONE_MICRO, {"parallel__grad_reduce_in_bf16": rounded})
        run = trainer("gpt", world, f"{meet}{stage}{rounded}", folder, **values)
        seen[stage, rounded] = [run.step(run.state.lr)[0] for _ in range(4)]
        run.mesh.destroy()
    exact = seen.pop((0, False))
    for losses in seen.values():
        assert losses != exact
        np.testing.assert_allclose(losses, exact, rtol=2e-3)
    assert seen[0, True] == seen[1, True] == seen[2, True]


CASES: dict[int, dict[str, Body]] = {
    2: {
        "gradients_in_bfloat16": _check_rounded,
        **{
            f"stage_{stage}_{model}": _same_training(
                model, _zero(stage), SMALL, {"batch__micro_batch_size": 2}
            )
            for stage in range(4)
            for model in ("gpt", "llama")
        },
        **{
            f"stage_{stage}_recomputed": _same_training("gpt", _zero(stage), SMALL, OVERLAP, FULL, DROPOUT)
            for stage in range(1, 4)
        },
        "stage_3_with_modules_recomputed": _same_training(
            "llama", _zero(3), SELECTIVE, {"batch__micro_batch_size": 2}
        ),
        **{
            f"stage_{stage}_context_2": _same_training(
                "llama", _zero(stage), SMALL, OVERLAP, {"parallel__context_parallel_size": 2}
            )
            for stage in range(1, 4)
        },
        "stage_1_in_one_bucket": _same_training("gpt", _zero(1)),
        "stage_1_overlapped": _same_training("gpt", _zero(1), SMALL, GATHER),
        "stage_2_overlapped": _same_training("llama", _zero(2), SMALL, GATHER),
        "overlap_changes_no_bit_of_stage_0": partial(
            _alike,
            "gpt",
            tuple(_merge(_zero(0), SMALL, {"batch__micro_batch_size": 2}, o) for o in ({}, OVERLAP)),
        ),
        "overlap_changes_no_bit_of_stage_1": partial(
            _alike,
            "gpt",
            tuple(_merge(_zero(1), SMALL, {"batch__micro_batch_size": 2}, o) for o in ({}, OVERLAP, GATHER)),
        ),
        "overlap_changes_no_bit_of_stage_2": partial(
            _alike, "llama", tuple(_merge(_zero(2), SMALL, overlap) for overlap in ({}, OVERLAP, GATHER))
        ),
        "stages_keep_the_same_bfloat16_weights": partial(
            _alike,
            "llama",
            tuple(_merge(_zero(stage), SMALL, ONE_MICRO | {"train__bf16": True}) for stage in range(3)),
        ),
        "stages_keep_the_same_float16_weights": partial(
            _alike,
            "gpt",
            tuple(
                _merge(
                    _zero(stage),
                    ONE_MICRO | {"train__fp16": True, "train__initial_loss_scale": 4096.0},
                )
                for stage in range(3)
            ),
        ),
        "stages_write_the_same_checkpoint": _same_files,
        **{
            f"resume_stage_{stage}_is_bitwise": partial(resumes, "gpt", _zero(stage), _zero(stage), True)
            for stage in range(4)
        },
        "resume_bfloat16_stage_3_is_bitwise": partial(
            resumes, "llama", _zero(3) | {"train__bf16": True}, _zero(3) | {"train__bf16": True}, True
        ),
        "resume_from_stage_3_on_tensor": partial(resumes, "gpt", _zero(3), TP2, False),
        "resume_from_stage_1_on_pipeline": partial(resumes, "gpt", _zero(1) | SMALL, PP2, False),
        "resume_from_stage_0_on_3": partial(resumes, "llama", _zero(0), _zero(3), False),
        **{
            f"stage_{stage}_stops_everywhere": partial(_stops, stage, ", on rank 1" if stage < 3 else "")
            for stage in range(4)
        },
        **{
            f"stage_{stage}_holds_its_bytes_in_{'bfloat16' if bf16 else 'float32'}": partial(
                _holds, stage, bf16
            )
            for stage in range(4)
            for bf16 in (False, True)
        },
        **{f"stage_{stage}_skips_everywhere": partial(_skips, stage) for stage in range(4)},
    },
    4: {
        **{
            f"stage_{stage}_data_4": _same_training("gpt", _zero(stage), SMALL, GATHER if stage else OVERLAP)
            for stage in range(4)
        },
        **{
            f"stage_{stage}_tensor_2": _same_training("llama", _zero(stage), SMALL, SP, OVERLAP)
            for stage in range(4)
        },
        **{
            f"stage_{stage}_pipeline_2_tied_gpt": _same_training("gpt", _zero(stage), SMALL, PP2, OVERLAP)
            for stage in range(4)
        },
        **{
            f"stage_{stage}_pipeline_2_{name}": _same_training(
                "gpt", _zero(stage), SMALL, PP2, OVERLAP, values
            )
            for stage in range(4)
            for name, values in (("zero_bubble", BUBBLE), ("virtual", VIRTUAL))
            if stage < 3 or values is VIRTUAL  # FSDP's weight gradients cannot be put off: refused
        },
        **{
            f"stage_{stage}_key_head_repeated": _same_training(
                "llama", _zero(stage), SMALL, SP, {"model__num_query_groups": 1}
            )
            for stage in range(1, 4)
        },
        "stage_1_pipeline_2_llama_gathers_late": _same_training("llama", _zero(1), SMALL, PP2, GATHER),
        "overlap_changes_no_bit_over_4": partial(
            _alike, "gpt", tuple(_merge(_zero(1), SMALL, overlap) for overlap in ({}, OVERLAP, GATHER))
        ),
        "resume_from_stage_2_tensor_2_on_stage_3_pipeline_2": partial(
            resumes, "llama", _zero(2) | TP2 | SMALL, _zero(3) | PP2, False
        ),
        "resume_from_stage_3_pipeline_2_on_stage_1_tensor_2": partial(
            resumes, "gpt", _zero(3) | PP2, _zero(1) | SP, False
        ),
    },
}


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], str]:
    return Outcomes(CASES, tmp_path_factory, requested_values(request, "case")).outcome


ALL = [(ranks, case) for ranks in CASES for case in CASES[ranks]]


@pytest.mark.parametrize(("ranks", "case"), one_of_each_kind(without_digits, ALL))
def test_replicas_train_as_one_process_does(
    outcome: Callable[[int, str], str], ranks: int, case: str
) -> None:
    assert outcome(ranks, case) == ""
