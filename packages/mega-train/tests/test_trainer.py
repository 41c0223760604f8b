"""Training in one process: accumulation, resuming, validation, stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import FormatError, MegaError
from mega_train.engine.forward_backward import MeanLosses
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer
from mega_train.engine.validation import evaluate
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.event_log import EventLog, read_events
from mega_train.telemetry.events import Event, Message, StepEnd
from mega_train.telemetry.observers import Observers


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _trainer(
    resolve_config: ResolveConfig, corpus: IndexedDataset, resume: Path | None = None, **values: Any
) -> Trainer:
    checkpoint = Checkpoint.open(resume) if resume else None
    assert corpus.info is not None
    plan = resolve_config(corpus=corpus.info.tokenizer, **values)
    return Trainer(plan, Mesh(), corpus, checkpoint=checkpoint)


def _steps(trainer: Trainer, count: int) -> list[tuple[float, float]]:
    return [trainer.step(trainer.state.lr) for _ in range(count)]


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {row.name: weight.detach().clone() for row, weight in trainer.params}


def test_many_micro_batches_train_as_one_big_batch(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    # K's biases have gradients that are zero but for rounding; a usual eps would blow them up to whole steps
    single, many = (
        _trainer(resolve_config, open_corpus, optimizer__adam_eps=1e-3, batch__micro_batch_size=micro)
        for micro in (4, 1)
    )
    assert (single.config.accumulation_steps, many.config.accumulation_steps) == (1, 4)
    np.testing.assert_allclose(_steps(many, 3), _steps(single, 3), rtol=1e-5)
    for name, weight in _weights(single).items():
        torch.testing.assert_close(_weights(many)[name], weight, rtol=1e-4, atol=1e-5)


def test_a_long_step_gives_signs_of_life(resolve_config: ResolveConfig, open_corpus: IndexedDataset) -> None:
    run = _trainer(resolve_config, open_corpus, batch__micro_batch_size=1)
    _steps(run, 1)
    assert run.forward_backward.heartbeat == 2 * run.config.accumulation_steps == 8, (
        "a forward and a backward pass each"
    )


def test_the_same_seed_trains_bitwise_alike_and_another_does_not(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    a, b, c = (_trainer(resolve_config, open_corpus, train__seed=seed) for seed in (1, 1, 2))
    first = _steps(a, 3)
    assert _steps(b, 3) == first
    assert _steps(c, 3) != first


def test_dropout_changes_training_and_not_validation(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    values: dict[str, Any] = {"data__split": "80,20,0", "evaluation__eval_iters": 2}
    kinds: list[dict[str, Any]] = [{}, {"train__hidden_dropout": 0.5}, {"train__attention_dropout": 0.5}]
    runs = [_trainer(resolve_config, open_corpus, **values, **kind) for kind in kinds]
    assert len({evaluate(run, run.valid["validation"]).total for run in runs}) == 1
    losses = [_steps(run, 2) for run in runs]
    assert len({step for loss in losses for step in loss}) == 6
    assert _steps(_trainer(resolve_config, open_corpus, **values, **kinds[1]), 2) == losses[1]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_loss_falls_and_a_resumed_run_goes_on_bitwise(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path, bf16: bool
) -> None:
    values: dict[str, Any] = {
        "train__bf16": bf16,
        "train__train_iters": 60,
        "batch__global_batch_size": 8,
        "batch__seq_length": 16,
        "optimizer__lr": 0.02,
        "checkpoint__save": str(tmp_path),
    }
    run = _trainer(resolve_config, open_corpus, **values)
    before = _steps(run, 50)
    run.save()
    run.saver.finish()
    after = _steps(run, 10)
    assert after[-1][0] < before[0][0] / 2, "half of the loss it began with"
    resumed = _trainer(resolve_config, open_corpus, tmp_path, **values)
    assert (resumed.state.iteration, resumed.state.consumed_samples, resumed.optimizer.steps) == (50, 400, 50)
    assert {weight.dtype for _, weight in resumed.params} == {torch.bfloat16 if bf16 else torch.float32}
    assert _steps(resumed, 10) == after
    for name, weight in _weights(run).items():
        assert torch.equal(_weights(resumed)[name], weight), name


def test_a_float32_run_goes_on_from_a_bfloat16_one_at_its_main_weights(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    run = _trainer(resolve_config, open_corpus, train__bf16=True, checkpoint__save=str(tmp_path))
    _steps(run, 3)
    run.save()
    run.saver.finish()
    resumed = _trainer(resolve_config, open_corpus, tmp_path)
    for main, (row, weight) in zip(run.optimizer.main_params, resumed.params, strict=True):
        assert torch.equal(main, weight.detach().flatten()), row.name


def test_finetuning_takes_the_weights_alone(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    run = _trainer(resolve_config, open_corpus, checkpoint__save=str(tmp_path))
    _steps(run, 3)
    run.save()
    run.saver.finish()
    tuned = _trainer(resolve_config, open_corpus, tmp_path, checkpoint__finetune=True)
    assert (tuned.state.iteration, tuned.state.consumed_samples, tuned.optimizer.steps) == (0, 0, 0)
    assert all(torch.equal(_weights(tuned)[name], weight) for name, weight in _weights(run).items())
    assert not any(tensor.any() for _, _, tensor in tuned.optimizer.state_shards())


def test_validation_trains_nothing_and_reads_the_validation_split(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    values: dict[str, Any] = {
        "evaluation__eval_iters": 2,
        "evaluation__eval_interval": 5,
        "data__split": "80,20,0",
    }
    run = _trainer(resolve_config, open_corpus, **values)
    before = _weights(run)
    loss = evaluate(run, run.valid["validation"]).total
    assert 2 < loss < 5
    assert evaluate(run, run.valid["validation"]).total == loss
    assert all(torch.equal(weight, before[name]) for name, weight in _weights(run).items())
    streams = (run.train, run.valid["validation"])
    train, valid = (set(stream.parts[0].index.document.tolist()) for stream in streams)
    assert train == set(range(96))
    assert valid == set(range(96, 120))
    run.state.iteration = 10
    assert evaluate(run, run.valid["validation"]).total != loss, "the second validation reads on"


def test_without_a_validation_split_there_is_no_validation(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    assert _trainer(resolve_config, open_corpus, evaluation__eval_iters=2, data__split="1,0,0").valid == {}


def test_a_masked_end_of_document_carries_no_loss(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    plain = _trainer(resolve_config, open_corpus)
    masked = _trainer(resolve_config, open_corpus, data__eod_mask_loss=True)
    assert _steps(plain, 1)[0][0] != _steps(masked, 1)[0][0]


def test_documents_kept_apart_are_another_computation(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    norms = {
        (attention, positions): _steps(
            _trainer(
                resolve_config,
                open_corpus,
                data__reset_attention_mask=attention,
                data__reset_position_ids=positions,
            ),
            1,
        )[0][1]
        for attention in (False, True)
        for positions in (False, True)
    }
    assert len(set(norms.values())) == 4


def _spoil(run: Trainer, value: float) -> None:
    with torch.no_grad():
        next(iter(run.params))[1][0, 0] = value


def test_what_is_not_finite_stops_the_run_before_it_changes_anything(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    run = _trainer(resolve_config, open_corpus)
    _steps(run, 2)
    _spoil(run, float("nan"))
    before = _weights(run)
    with pytest.raises(MegaError) as caught:
        _steps(run, 1)
    assert str(caught.value).startswith(
        "iteration 3: loss or gradient is not finite: found loss nan, gradient norm nan, first in "
        "final_norm.bias, on rank 0, whose weights are not finite, wanted numbers; hint: a lower --lr"
    )
    assert run.state.iteration == 2
    for name, weight in _weights(run).items():
        assert torch.equal(weight.nan_to_num(), before[name].nan_to_num()), name


def test_a_loss_that_is_not_finite_stops_the_run_though_its_gradient_is(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _trainer(resolve_config, open_corpus)
    mean = run.forward_backward.mean_losses

    def add_infinity(*arguments: Any, **keywords: Any) -> MeanLosses:
        return MeanLosses(mean(*arguments, **keywords).total + torch.inf, {})

    monkeypatch.setattr(run.forward_backward, "mean_losses", add_infinity)
    with pytest.raises(
        MegaError, match=r"found loss inf, gradient norm \d[\d.]*, first in no parameter, wanted"
    ):
        _steps(run, 1)
    assert run.state.iteration == 0


def test_what_is_not_finite_may_be_skipped(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    run = _trainer(resolve_config, open_corpus, train__on_non_finite="'skip'", optimizer__lr_warmup_iters=5)
    _steps(run, 2)
    value, rate = next(iter(run.params))[1][0, 0].item(), run.state.lr
    _spoil(run, float("nan"))
    before = _weights(run)
    ((loss, norm),) = _steps(run, 1)
    assert np.isnan([loss, norm]).all()
    assert (
        run.state.iteration,
        run.state.consumed_samples,
        run.state.skipped_samples,
        run.optimizer.steps,
    ) == (3, 12, 4, 2)
    assert run.state.lr == rate > 0, "the learning rate's schedule does not advance, as Megatron's"
    for name, weight in _weights(run).items():
        assert torch.equal(weight.nan_to_num(), before[name].nan_to_num()), name
    _spoil(run, value)
    assert np.isfinite(_steps(run, 1)).all()
    assert (run.state.iteration, run.state.skipped_samples, run.optimizer.steps) == (4, 4, 3)
    assert run.state.lr > rate


def test_float16_gradients_that_overflow_are_skipped_until_the_scale_fits_and_a_resumed_run_goes_on_bitwise(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "train__fp16": True,
        "train__loss_scale_window": 20,
        "train__train_iters": 90,
        "batch__global_batch_size": 8,
        "batch__seq_length": 16,
        "optimizer__lr": 0.02,
        "optimizer__lr_warmup_iters": 5,
        "checkpoint__save": str(tmp_path),
    }
    run = _trainer(resolve_config, open_corpus, **values)
    before = _steps(run, 70)
    skipped = sum(not np.isfinite(norm) for _, norm in before)
    assert 5 < skipped < 25, "a scale of 2^32 overflows at first"
    assert np.isfinite([loss for loss, _ in before]).all()
    assert (run.state.iteration, run.state.consumed_samples, run.state.skipped_samples) == (
        70,
        560,
        8 * skipped,
    )
    assert run.optimizer.steps == 70 - skipped
    assert 1 < run.loss_scaler.value < 2.0**32
    assert {weight.dtype for _, weight in run.params} == {torch.float16}
    assert before[-1][0] < before[0][0] / 2
    run.save()
    run.saver.finish()
    stored = Checkpoint.open(tmp_path).tensors
    assert {tensor.dtype for tensor in stored["model"].values()} == {"F16"}
    assert {tensor.dtype for tensor in stored["optim.main"].values()} == {"F32"}
    after = _steps(run, 20)
    resumed = _trainer(resolve_config, open_corpus, tmp_path, **values)
    assert (resumed.state.skipped_samples, resumed.state.lr) == (
        8 * skipped,
        resumed.config.lr_schedule.lr_at(560 - 8 * skipped),
    )
    np.testing.assert_array_equal(_steps(resumed, 20), after)
    assert resumed.loss_scaler == run.loss_scaler
    for name, weight in _weights(run).items():
        assert torch.equal(_weights(resumed)[name], weight), name


def test_a_loss_scale_changes_no_gradient(resolve_config: ResolveConfig, open_corpus: IndexedDataset) -> None:
    scaled, second = (
        _trainer(resolve_config, open_corpus, train__fp16=True, train__loss_scale=s) for s in (1024.0, 4096.0)
    )
    first = scaled.step(0.0)
    assert first == pytest.approx(second.step(0.0), rel=1e-3)
    assert first == pytest.approx(_trainer(resolve_config, open_corpus).step(0.0), rel=1e-2)


def test_a_token_outside_the_vocabulary_is_refused(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    plan = resolve_config(model__vocab_size=20)  # a corpus that does not say its tokenizer
    run = Trainer(plan, Mesh(), open_corpus)
    line = (
        r"toy_text_document: contains a token outside the model's vocabulary: found (2\d|3[0-2]), "
        r"wanted 0 to 19; hint: a dataset made with the model's tokenizer, or a larger --vocab-size"
    )
    with pytest.raises(FormatError, match=line):
        _steps(run, 1)


class RecordingObserver:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_the_loop_reports_validates_saves_and_leaves_in_step(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "log__log_interval": 2,
        "evaluation__eval_iters": 1,
        "evaluation__eval_interval": 3,
        "data__split": "80,20,0",
        "checkpoint__save": str(tmp_path),
        "checkpoint__save_interval": 4,
    }
    run, heard = _trainer(resolve_config, open_corpus, **values), RecordingObserver()
    watch, ticks = Observers([EventLog(tmp_path), heard]), iter(range(1000))
    TrainLoop(run, watch, clock=lambda: float(next(ticks))).run()
    events = read_events(tmp_path)
    assert [e["iteration"] for e in events if e["event"] == "train_log"] == [2, 4, 6, 8, 10]
    assert [e["iteration"] for e in events if e["event"] == "validation"] == [3, 6, 9, 10]
    assert all(
        e["iteration_seconds"] == 1.0 and e["tokens_per_second"] == 32
        for e in events
        if e["event"] == "train_log"
    )
    assert [e["iteration"] for e in events if e["event"] == "checkpoint"] == [4, 8, 10]
    steps = [event for event in heard.events if isinstance(event, StepEnd)]
    assert [step.iteration for step in steps] == list(range(1, 11))
    assert {(step.tokens, step.seconds) for step in steps} == {(32, 1.0)}
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000004",
        "iter_0000008",
        "iter_0000010",
    ]
    trainer = _trainer(resolve_config, open_corpus, tmp_path, **values)
    written = (tmp_path / "iter_0000010" / "manifest.json").stat().st_mtime_ns
    TrainLoop(trainer, watch).run()
    assert heard.events[-1] == Message("nothing is left to train: 10 iterations are done")
    assert (tmp_path / "iter_0000010" / "manifest.json").stat().st_mtime_ns == written, "saved once is enough"


def test_an_exit_interval_saves_and_leaves_and_the_rest_is_as_if_it_had_not(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    whole = _trainer(resolve_config, open_corpus, checkpoint__save=str(tmp_path / "whole"))
    TrainLoop(whole, Observers()).run()
    values: dict[str, Any] = {"train__exit_interval": 4, "checkpoint__save": str(tmp_path / "parts")}
    ends = []
    for resume in (None, tmp_path / "parts", tmp_path / "parts"):
        run = _trainer(resolve_config, open_corpus, resume, **values)
        TrainLoop(run, Observers([EventLog(tmp_path / "parts")])).run()
        ends.append(run.state.iteration)
    assert ends == [4, 8, 10]
    iterations = [e["iteration"] for e in read_events(tmp_path / "parts") if e["event"] == "train_log"]
    assert iterations == [4, 8, 10], "who leaves between two lines of the log says where"
    assert all(torch.equal(_weights(run)[name], weight) for name, weight in _weights(whole).items())


def test_a_run_that_goes_on_with_smaller_batches_reads_no_sample_number_twice(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    run = _trainer(resolve_config, open_corpus, batch__global_batch_size=80, checkpoint__save=str(tmp_path))
    _steps(run, 8)
    run.save()
    run.saver.finish()
    assert run.state.consumed_samples == 640
    resumed = _trainer(resolve_config, open_corpus, tmp_path, batch__global_batch_size=40)
    assert len(resumed.train) >= 640 + 2 * 40 > resumed.config.train_samples
