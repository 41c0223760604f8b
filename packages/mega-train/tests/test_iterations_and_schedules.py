"""Iterations, samples and schedules of a run, in checkpoints and after resuming."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from mega_model.distributed.mesh import Mesh, World
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.data.gpt_dataset import GPTDataset
from mega_train.engine.determinism import check_nccl_algorithm, deterministic_algorithms
from mega_train.engine.train import prepare, train
from mega_train.engine.trainer import Trainer
from mega_train.engine.validation import evaluate
from mega_train.resolve import ResolvedConfig
from mega_train.schedules.lr import ParamSchedules

SAMPLED: dict[str, Any] = {"train__train_iters": None, "train__train_samples": 100}
RAMP: dict[str, Any] = SAMPLED | {"batch__global_batch_size": 8, "batch__rampup_batch_size": "[2, 2, 24]"}


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def test_a_run_counted_in_samples_has_its_schedules_in_samples(resolve_config: ResolveConfig) -> None:
    plan = resolve_config(**SAMPLED, optimizer__lr_warmup_samples=7, optimizer__lr_decay_samples=60)
    assert (plan.iterations, plan.train_samples) == (25, 100)
    assert (plan.lr_schedule.warmup, plan.lr_schedule.decay) == (7.0, 60)
    assert resolve_config(**SAMPLED).lr_schedule.decay == 100
    assert (
        resolve_config(optimizer__lr_wsd_decay_iters=3, optimizer__lr_decay_style="WSD").lr_schedule.anneal
        == 12
    )


def test_a_ramp_changes_the_micro_batches_of_a_step_and_the_steps_of_a_run(
    resolve_config: ResolveConfig,
) -> None:
    plan = resolve_config(**RAMP, world=2)
    assert [plan.batch_size_schedule.size_at(consumed) for consumed in (0, 8, 16, 24, 25)] == [2, 4, 6, 8, 8]
    assert (plan.global_batch_size, plan.accumulation_steps, plan.num_micro_batches(2)) == (8, 4, 1)
    assert plan.iterations == 4 + 2 + 2 + 9, "4 x 2 + 2 x 4 + 2 x 6 samples on the ramp, then whole steps"


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"train__train_samples": 100},
        "--train-samples: excludes --train-iters: found 10 and 100, wanted one of them",
    ),
    (
        {**SAMPLED, "train__train_samples": 3},
        "--train-samples: not enough for a step: found 3, wanted 4 or more",
    ),
    ({**SAMPLED, "train__train_samples": 0}, "--train-samples: not above 0: found 0, wanted samples"),
    (
        {"batch__rampup_batch_size": "[2, 2, 24]"},
        "--rampup-batch-size: needs a run counted in samples: found --train-iters, wanted --train-samples",
    ),
    (
        {**RAMP, "batch__rampup_batch_size": "[3, 2, 24]"},
        "--rampup-batch-size: does not end at --global-batch-size: found 3 2 24, wanted START + a whole "
        "number of INCREMENTs = 8, each above 0, over 1 or more samples",
    ),
    (
        {**RAMP, "batch__rampup_batch_size": "[8, 2, 24]"},
        "--rampup-batch-size: does not end at --global-batch-size",
    ),
    (
        {**RAMP, "batch__rampup_batch_size": "[2, 0, 24]"},
        "--rampup-batch-size: does not end at --global-batch-size",
    ),
    (
        {**RAMP, "batch__rampup_batch_size": "[2, 2, 0]"},
        "--rampup-batch-size: does not end at --global-batch-size",
    ),
    (
        {**RAMP, "world": 4},
        "--rampup-batch-size: has a size that is not a multiple of micro-batch size x data-parallel size: "
        "found 2 of 2 2 24, wanted multiples of 4",
    ),
    (
        {**RAMP, "world": 2, "batch__rampup_batch_size": "[2, 3, 24]"},
        "--rampup-batch-size: has a size that is not a multiple of micro-batch size x data-parallel size: "
        "found 5 of 2 3 24, wanted multiples of 2; hint: --decrease-batch-size-if-needed rounds down",
    ),
    (
        {**SAMPLED, "optimizer__lr_decay_iters": 5},
        "--lr-decay-iters: the run is counted in samples: found 5, wanted --lr-decay-samples, as with "
        "--train-samples",
    ),
    (
        {"optimizer__lr_warmup_samples": 5},
        "--lr-warmup-samples: the run is counted in iters: found 5, wanted --lr-warmup-iters, as with "
        "--train-iters",
    ),
    (
        {**SAMPLED, "optimizer__lr_warmup_samples": 100},
        "--lr-warmup-samples: the warm-up does not end before",
    ),
    (
        {"optimizer__lr_warmup_init": 0.02},
        "--lr-warmup-init: is not between 0 and --lr: found 0.02, wanted 0 to 0.01",
    ),
    (
        {"optimizer__lr_decay_style": "WSD"},
        "--lr-wsd-decay-iters: missing: wanted how long the rate decays; hint: --lr-wsd-decay-iters 100",
    ),
    (
        {"optimizer__decoupled_min_lr": 0.1},
        "--decoupled-min-lr: needs --decoupled-lr: found 0.1; hint: --decoupled-lr 3e-4",
    ),
    (
        {"optimizer__decoupled_lr": 0.1, "optimizer__decoupled_min_lr": 0.2},
        "--decoupled-min-lr: is not between 0 and --decoupled-lr: found 0.2, wanted 0 to 0.1",
    ),
    (
        {"optimizer__lr_wsd_decay_iters": 3},
        "--lr-wsd-decay-iters: applies to WSD only: found linear; hint: --lr-decay-style WSD",
    ),
    (
        {
            "optimizer__lr_decay_style": "WSD",
            "optimizer__lr_wsd_decay_iters": 9,
            "optimizer__lr_warmup_iters": 2,
        },
        "--lr-wsd-decay-iters: the decay begins before the warm-up has ended: found 36 samples, wanted at "
        "most 32, those between warm-up and --lr-decay-iters",
    ),
    (
        {"optimizer__end_weight_decay": 0.2},
        "--end-weight-decay: the weight decay is constant: found 0.2; hint: --weight-decay-incr-style linear",
    ),
    (
        {"optimizer__weight_decay_incr_style": "linear", "optimizer__start_weight_decay": 0.2},
        "--end-weight-decay: missing: wanted a decay, for linear",
    ),
    (
        {
            "optimizer__weight_decay_incr_style": "cosine",
            "optimizer__start_weight_decay": 0.2,
            "optimizer__end_weight_decay": 0.1,
        },
        "--end-weight-decay: is below --start-weight-decay: found 0.1, wanted 0.2 or more",
    ),
    (
        {
            "optimizer__weight_decay_incr_style": "linear",
            "optimizer__start_weight_decay": -0.2,
            "optimizer__end_weight_decay": 0.1,
        },
        "--start-weight-decay: not a finite number of 0 or more: found -0.2, wanted 0 or more",
    ),
    (
        {
            "optimizer__override_opt_param_scheduler": True,
            "optimizer__use_checkpoint_opt_param_scheduler": True,
        },
        "--override-opt_param-scheduler: excludes --use-checkpoint-opt_param-scheduler: found both",
    ),
]


@pytest.mark.parametrize(("values", "line"), REFUSED)
def test_a_length_that_cannot_be_is_refused_by_name(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(**values)
    assert str(refused.value).startswith(line)


def test_sizes_that_replicas_cannot_share_are_rounded_down_where_that_is_asked_for(
    resolve_config: ResolveConfig,
) -> None:
    plan = resolve_config(
        **RAMP | {"batch__rampup_batch_size": "[2, 3, 24]"},
        world=2,
        batch__decrease_batch_size_if_needed=True,
    )
    assert [plan.batch_size_schedule.size_at(consumed) for consumed in (0, 12, 25)] == [2, 4, 8]
    assert (
        resolve_config(
            batch__global_batch_size=11, world=2, batch__decrease_batch_size_if_needed=True
        ).global_batch_size
        == 10
    )


def _trainer(
    resolve_config: ResolveConfig, corpus: IndexedDataset, resume: Path | None = None, **values: Any
) -> Trainer:
    checkpoint = Checkpoint.open(resume) if resume else None
    return Trainer(resolve_config(**values), Mesh(), corpus, checkpoint=checkpoint)


def _steps(trainer: Trainer, count: int) -> list[tuple[float, float]]:
    return [trainer.step(trainer.state.lr) for _ in range(count)]


def test_a_step_of_a_ramp_is_the_step_of_a_run_whose_batches_have_that_size(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    ramp = _trainer(resolve_config, open_corpus, **RAMP)
    plain = _trainer(resolve_config, open_corpus, **SAMPLED, batch__global_batch_size=2)
    assert _steps(ramp, 4) == _steps(plain, 4)
    assert (
        ramp.state.iteration,
        ramp.state.consumed_samples,
        ramp.state.global_batch_size,
        plain.state.global_batch_size,
    ) == (
        4,
        8,
        4,
        2,
    )
    _steps(ramp, 13)
    assert (ramp.state.iteration, ramp.state.consumed_samples) == (ramp.config.iterations, 100)


def test_a_run_that_goes_on_in_the_middle_of_its_ramp_does_so_bitwise(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    values = RAMP | {
        "checkpoint__save": str(tmp_path),
        "optimizer__weight_decay_incr_style": "linear",
        "optimizer__start_weight_decay": 0.1,
        "optimizer__end_weight_decay": 0.9,
        "optimizer__lr_decay_style": "WSD",
        "optimizer__lr_wsd_decay_samples": 80,
        "optimizer__lr_warmup_samples": 10,
    }
    run = _trainer(resolve_config, open_corpus, **values)
    _steps(run, 5)
    run.save()
    run.saver.finish()
    after = _steps(run, 6)
    resumed = _trainer(resolve_config, open_corpus, tmp_path, **values)
    assert (resumed.state.iteration, resumed.state.consumed_samples, resumed.state.global_batch_size) == (
        5,
        12,
        4,
    )
    assert len(resumed.train) == len(run.train)
    assert _steps(resumed, 6) == after
    for (row, first), (_, second) in zip(run.params, resumed.params, strict=True):
        assert torch.equal(first, second), row.name


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_does_so_bitwise(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"batch__global_batch_size": 64, "batch__micro_batch_size": 64}
    values |= {"train__train_iters": 12, "checkpoint__save": str(tmp_path)}
    run = _trainer(resolve_config, open_corpus, **values)
    assert run.train.parts[0].index.epochs == 3
    _steps(run, 7)
    run.save()
    run.saver.finish()
    after = _steps(run, 2)
    resumed = _trainer(resolve_config, open_corpus, tmp_path, **values)
    assert len(resumed.train) // 3 < resumed.state.consumed_samples < len(resumed.train) // 3 * 2
    assert _steps(resumed, 2) == after


def test_weight_decay_that_grows_changes_the_update(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    grows: dict[str, Any] = {
        "optimizer__weight_decay_incr_style": "linear",
        "optimizer__start_weight_decay": 0.0,
        "optimizer__end_weight_decay": 50.0,
    }
    none, more = (
        _trainer(resolve_config, open_corpus, **kind) for kind in ({"optimizer__weight_decay": 0.0}, grows)
    )
    assert _steps(none, 2) == _steps(more, 2), "the first step has the decay of 0 samples"
    assert _steps(none, 1) != _steps(more, 1)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_embedding_and_output_may_have_a_rate_of_their_own(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, optimizer: str
) -> None:
    values: dict[str, Any] = {
        "optimizer__optimizer": optimizer,
        "model__untie_embeddings_and_output_weights": True,
    }
    values |= {"optimizer__lr_decay_style": "constant", "optimizer__weight_decay": 0.0}
    plain = _trainer(resolve_config, open_corpus, **values)
    still = _trainer(
        resolve_config, open_corpus, **values, optimizer__decoupled_lr=1e-30, optimizer__decoupled_min_lr=0.0
    )
    before = {row.name: weight.detach().clone() for row, weight in plain.params}
    _steps(plain, 1)
    _steps(still, 1)
    for (row, moved), (_, weight) in zip(plain.params, still.params, strict=True):
        end = row.name in ("embed.weight", "head.weight")
        assert torch.equal(weight, before[row.name] if end else moved), row.name
        assert not torch.equal(moved, before[row.name]), row.name
    schedules = resolve_config(optimizer__decoupled_lr=0.002, optimizer__min_lr=0.001).schedules
    assert schedules.decoupled_lr is not None
    assert [schedules.decoupled_lr.lr_at(samples) for samples in (0, 20, 40)] == pytest.approx(
        [0.002, 0.0015, 0.001]
    )
    assert ParamSchedules.from_state_dict(schedules.state_dict()) == schedules


def test_a_run_goes_on_with_the_schedules_it_began_with_or_says_that_it_does_not(
    resolve_config: ResolveConfig,
) -> None:
    def resume_schedules(loaded: ParamSchedules, **values: Any) -> ParamSchedules:
        return resolve_config(loaded_courses=loaded, **values).schedules

    begun = resolve_config(optimizer__lr_warmup_iters=2).schedules
    assert resume_schedules(begun, optimizer__lr_warmup_iters=2) == begun
    ends = "ends the decay of the learning rate elsewhere than in the resumed run, without"
    hint = (
        "the checkpoint's; hint: --use-checkpoint-opt_param-scheduler keeps the checkpoint's schedules of "
        "learning rate and weight decay, --override-opt_param-scheduler uses these"
    )
    # the flag is the one that was changed, and not what follows from it
    for changed, line in (
        (
            {"train__train_iters": 20, "optimizer__lr_warmup_iters": 2},
            f"--train-iters: {ends} --lr-decay-iters: found 20 steps of 4 samples, "
            "wanted 10 steps of 4 samples",
        ),
        (
            {"train__train_iters": 20, "optimizer__lr_warmup_fraction": 0.2},
            f"--train-iters: {ends} --lr-decay-iters: found 20 steps of 4 samples, "
            "wanted 10 steps of 4 samples",
        ),
        (
            {"optimizer__lr_decay_iters": 20, "optimizer__lr_warmup_iters": 2},
            "--lr-decay-iters: is not that of the resumed run: found 20 steps of 4 samples, wanted "
            "10 steps of 4 samples",
        ),
        (
            {"optimizer__lr_warmup_fraction": 0.5},
            "--lr-warmup-fraction: is not that of the resumed run: found 5 steps of 4 samples, wanted "
            "2 steps of 4 samples",
        ),
        (
            {"batch__global_batch_size": 8, "optimizer__lr_warmup_iters": 1},
            f"--train-iters: {ends} --lr-decay-iters: found 10 steps of 8 samples, "
            "wanted 5 steps of 8 samples",
        ),
        (
            {"train__train_samples": 80, "train__train_iters": None, "optimizer__lr_warmup_samples": 8},
            f"--train-samples: {ends} --lr-decay-samples: found 80 samples, wanted 40 samples",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            resume_schedules(begun, **changed)
        assert str(refused.value) == f"{line}, {hint}"
    with pytest.raises(ConfigError, match=r"^--lr: is not that of the resumed run: found 0\.02, wanted"):
        resume_schedules(begun, optimizer__lr_warmup_iters=2, optimizer__lr=0.02)
    longer = {"train__train_iters": 20}
    assert resume_schedules(begun, **longer, optimizer__use_checkpoint_opt_param_scheduler=True) == begun
    assert (
        resume_schedules(begun, **longer, optimizer__override_opt_param_scheduler=True)
        == resolve_config(**longer).schedules
    )
    flat = resolve_config(optimizer__lr_decay_style="constant").schedules
    assert resume_schedules(flat, optimizer__lr_decay_style="constant", **longer).lr.decay == 80, (
        "nothing depends on it"
    )


def test_a_checkpoint_has_the_schedules(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    run = _trainer(resolve_config, open_corpus, checkpoint__save=str(tmp_path))
    _steps(run, 1)
    run.save()
    run.saver.finish()
    trainer = Checkpoint.open(tmp_path).trainer
    assert set(trainer) >= {"lr_schedule", "wd_schedule"}
    assert ParamSchedules.from_state_dict(trainer) == run.config.schedules


CURRICULUM: dict[str, Any] = {
    "curriculum__curriculum_start_length": 2,
    "curriculum__curriculum_steps": 8,
    "curriculum__curriculum_length_multiple": 2,
}


def test_a_curriculum_is_deepspeeds_fixed_linear_and_fixed_root(resolve_config: ResolveConfig) -> None:
    """floor((step / total) ^ (1 / root) * (max - min) + min), less what is left of it by the multiple."""
    even = resolve_config(batch__seq_length=16, **CURRICULUM).seq_length_schedule
    assert [even.length_at(step) for step in range(1, 12)] == [2, 4, 6, 8, 10, 12, 14, 16, 16, 16, 16]
    root = resolve_config(
        batch__seq_length=16, **CURRICULUM | {"curriculum__curriculum_root": 2.0}
    ).seq_length_schedule
    assert [root.length_at(step) for step in range(1, 9)] == [6, 8, 10, 10, 12, 14, 14, 16]
    odd = resolve_config(
        batch__seq_length=16,
        **CURRICULUM
        | {"curriculum__curriculum_start_length": 5, "curriculum__curriculum_length_multiple": 4},
    ).seq_length_schedule
    assert odd.all_lengths == [5, 8, 12, 16]
    assert [odd.length_at(step) for step in range(1, 9)] == [5, 5, 8, 8, 8, 12, 12, 16]
    assert {odd.length_at(step) for step in range(1, 100)} <= set(odd.all_lengths)
    assert resolve_config().seq_length_schedule.length_at(1) == 8


SHORT: list[tuple[dict[str, Any], str]] = [
    (
        {"curriculum__curriculum_start_length": 4},
        "--curriculum-steps: missing: wanted optimizer steps; hint: --curriculum-steps",
    ),
    (
        {"curriculum__curriculum_steps": 4},
        "--curriculum-start-length: missing: wanted tokens; hint: --curriculum-start",
    ),
    (
        {"curriculum__curriculum_start_length": 8, "curriculum__curriculum_steps": 4},
        "--curriculum-start-length: leaves nothing to grow: ",
    ),
    (
        {**CURRICULUM, "curriculum__curriculum_start_length": 0},
        "--curriculum-start-length: not above 0: found 0, wanted tokens",
    ),
    (
        {**CURRICULUM, "curriculum__curriculum_length_multiple": 0},
        "--curriculum-length-multiple: not above 0: found 0",
    ),
    (
        {**CURRICULUM, "curriculum__curriculum_root": 0.0},
        "--curriculum-root: not above 0: found 0.0, wanted a root",
    ),
    (
        {
            **CURRICULUM,
            "world": 2,
            "parallel__context_parallel_size": 2,
            "curriculum__curriculum_start_length": 4,
        },
        "--curriculum-length-multiple: some lengths cannot be split over the ranks: found 6 tokens "
        "of 4, and so on "
        "by 2, wanted lengths for cp=2 and tp=1; hint: a --curriculum-start-length and a "
        "--curriculum-length-multiple that 4 divides",
    ),
    (
        {
            **CURRICULUM,
            "world": 2,
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
            "curriculum__curriculum_start_length": 3,
        },
        "--curriculum-length-multiple: some lengths cannot be split over the ranks: found 3 tokens "
        "of 3, and so on",
    ),
]


@pytest.mark.parametrize(("values", "line"), SHORT)
def test_a_curriculum_that_cannot_be_is_refused_by_name(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(**values)
    assert str(refused.value).startswith(line)


class Beginnings(GPTDataset):
    """Two tokens of each sample, and a target for the second."""

    def __getitem__(self, i: int) -> np.ndarray:
        return super().__getitem__(i)[:3]


def test_a_curriculum_reads_the_beginning_of_the_same_samples_and_goes_on_bitwise(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {"evaluation__eval_iters": 1, "data__split": "80,20,0"}
    values = plain | CURRICULUM | {"checkpoint__save": str(tmp_path)}
    run = _trainer(resolve_config, open_corpus, **values)
    whole, short = (_trainer(resolve_config, open_corpus, **plain) for _ in range(2))
    scores = [evaluate(scored, scored.valid["validation"]) for scored in (run, whole)]
    assert scores[0] == scores[1], "a validation is of whole samples"
    first = run.step(0.0)
    assert first != whole.step(0.0)
    short.train.parts = [Beginnings(part.dataset, part.index) for part in short.train.parts]
    assert first == short.step(0.0)
    assert (run.state.consumed_samples, run.state.consumed_tokens, run.state.seq_length) == (4, 4 * 2, 2)
    _steps(run, 3)
    assert (run.state.consumed_samples, run.state.consumed_tokens, run.state.seq_length) == (
        16,
        4 * (2 + 2 + 4 + 4),
        4,
    )
    run.save()
    run.saver.finish()
    after = _steps(run, 4)
    resumed = _trainer(resolve_config, open_corpus, tmp_path, **values)
    assert (resumed.state.iteration, resumed.state.consumed_tokens, resumed.state.seq_length) == (4, 48, 4)
    assert _steps(resumed, 4) == after
    assert (run.state.seq_length, run.state.consumed_tokens) == (8, resumed.state.consumed_tokens)
    for (row, weight), (_, second) in zip(run.params, resumed.params, strict=True):
        assert torch.equal(weight, second), row.name


def test_arithmetic_that_repeats_is_asked_for_and_put_back() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_in_deterministic_mode_a_run_repeats_bit_for_bit(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        run = resolve_config(
            train__deterministic_mode=True,
            train__hidden_dropout=0.1,
            checkpoint__save=str(tmp_path / name),
            data__data_path=f'["{open_corpus.prefix}"]',
        ).run
        assert train(prepare(run, "gpt", World()), World(), io.StringIO()) == 0
    first, second = (
        (tmp_path / name / "iter_0000010/model-00000.safetensors").read_bytes() for name in ("one", "other")
    )
    assert first == second


def test_nccl_is_to_add_up_in_one_order() -> None:
    check_nccl_algorithm({"NCCL_ALGO": "Ring"})
    for environment, wording in (({}, "no NCCL_ALGO"), ({"NCCL_ALGO": "NVLS"}, "NCCL_ALGO=NVLS")):
        with pytest.raises(ConfigError) as refused:
            check_nccl_algorithm(environment)
        assert str(refused.value) == (
            f"--deterministic-mode: NCCL's order of summation is not fixed: found {wording}, wanted "
            "Tree | Ring | "
            "CollnetDirect | CollnetChain | ^NVLS; hint: NCCL_ALGO=Ring before torchrun"
        )
