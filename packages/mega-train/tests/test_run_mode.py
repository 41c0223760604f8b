"""Initial state of a run, skipped parts of a checkpoint, and validation-only runs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.cli import main
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer
from mega_train.fault_tolerance.exit_conditions import EVAL_ONLY
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.event_log import read_events
from mega_train.telemetry.observers import Observers

StartTrainer = Callable[..., Trainer]

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"]
TRAINING = ["--global-batch-size", "4", "--train-iters", "4", "--lr", "0.01", "--eval-iters", "0"]


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


@pytest.fixture
def start_trainer(resolve_config: ResolveConfig, open_corpus: IndexedDataset) -> StartTrainer:
    """A trainer of TINY with these values, from a checkpoint if one is named."""

    def start(resume: Path | None = None, **values: Any) -> Trainer:
        checkpoint = Checkpoint.open(resume) if resume else None
        return Trainer(resolve_config(**values), Mesh(), open_corpus, checkpoint=checkpoint)

    return start


@pytest.fixture
def saved_run(start_trainer: StartTrainer, tmp_path: Path) -> tuple[Path, Trainer]:
    """A run that saved after 3 steps, and its trainer."""
    run = start_trainer(checkpoint__save=str(tmp_path / "run"))
    for _ in range(3):
        run.step(run.state.lr)
    run.save()
    run.saver.finish()
    return tmp_path / "run", run


def _same_weights(first: Trainer, second: Trainer) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(first.params, second.params, strict=True))


def test_without_its_optimizer_a_run_goes_on_with_samples_and_begins_its_schedules_anew(
    start_trainer: StartTrainer, saved_run: tuple[Path, Trainer]
) -> None:
    folder, run = saved_run
    resumed = start_trainer(folder, checkpoint__load_optim=False, optimizer__lr_warmup_iters=2)
    assert _same_weights(resumed, run)
    assert (resumed.state.iteration, resumed.state.consumed_samples, resumed.optimizer.steps) == (3, 12, 0)
    assert not any(values.any() for _, _, values in resumed.optimizer.state_shards())
    assert [resumed.state.lr, *[resumed.step(resumed.state.lr) and resumed.state.lr for _ in range(2)]] == [
        0.0,
        0.005,
        0.01,
    ]


def test_schedules_that_a_checkpoint_does_not_have_cannot_be_taken(
    corpus: Path, saved_run: tuple[Path, Trainer]
) -> None:
    folder = saved_run[0] / "iter_0000003"
    trainer_state = json.loads((folder / "trainer.json").read_text("utf-8"))
    del trainer_state["lr_schedule"]
    (folder / "trainer.json").write_text(json.dumps(trainer_state))
    rewrite_checksums(folder, FORMAT)
    result = _gpt(corpus, "--load", folder, "--use-checkpoint-opt_param-scheduler", code=2)
    assert result == (
        f"error: --use-checkpoint-opt_param-scheduler: the checkpoint has no schedules: found {folder}; "
        "hint: leave it out\n"
    )


def test_steps_that_are_passed_over_consume_their_samples_and_change_nothing(
    start_trainer: StartTrainer, tmp_path: Path
) -> None:
    values = {"optimizer__lr_decay_style": "constant", "checkpoint__save": str(tmp_path)}
    run = start_trainer(
        train__skip_train_iteration_range='["9-10", "2-3", "4-4", "3-4"]', log__log_interval=1, **values
    )
    assert run.config.skipped_iterations == (range(2, 5), range(9, 11))
    TrainLoop(run, Observers([])).run()
    assert (
        run.state.iteration,
        run.state.consumed_samples,
        run.state.skipped_samples,
        run.optimizer.steps,
    ) == (
        10,
        40,
        4 * 5,
        5,
    )
    assert Checkpoint.open(tmp_path).iteration == 10
    uninterrupted = start_trainer(**values | {"checkpoint__save": None})
    for consumed in (0, 16, 20, 24, 28):
        uninterrupted.state.consumed_samples = consumed
        uninterrupted.step(0.01)
    assert _same_weights(run, uninterrupted)


@pytest.mark.parametrize("text", ["5", "5-", "a-b", "7-3", "0-3", "-3-4"])
def test_what_is_no_range_of_steps_is_refused(resolve_config: ResolveConfig, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(train__skip_train_iteration_range=f'["{text}"]')
    assert str(refused.value) == (
        f"--skip-train-iteration-range: is not a range of steps: found {text}, wanted FIRST-LAST, such as "
        "100-120"
    )


@pytest.mark.parametrize("flag", ["train__skip_train", "train__eval_only"])
def test_a_run_that_only_validates_trains_and_saves_nothing(
    start_trainer: StartTrainer, saved_run: tuple[Path, Trainer], tmp_path: Path, flag: str
) -> None:
    folder, run = saved_run
    values = {
        "data__split": "80,20,0",
        "evaluation__eval_iters": 2,
        "train__train_iters": None,
        "optimizer__lr": None,
        "checkpoint__save": str(tmp_path / "other"),
    }
    only = start_trainer(folder, **values, **{flag: True})
    seen: list[Any] = []

    class Seen:
        def on_event(self, event: Any) -> None:
            seen.append(event)

        def close(self) -> None:
            pass

    assert TrainLoop(only, Observers([Seen()])).run() is EVAL_ONLY
    assert [(event.name, event.iteration) for event in seen] == [("validation", 3)]
    assert _same_weights(only, run)
    assert not list((tmp_path / "other").glob("*"))


def test_a_run_that_only_validates_needs_something_to_validate(start_trainer: StartTrainer) -> None:
    with pytest.raises(
        ConfigError, match=r"^--skip-train: no validation and no training are requested: found --eval-iters 0"
    ):
        start_trainer(train__skip_train=True)
    run = start_trainer(train__skip_train=True, evaluation__eval_iters=1, data__split="1,0,0")
    line = "--split: leaves nothing to validate: found 1,0,0, wanted a second share above 0; hint: --split"
    with pytest.raises(ConfigError, match=f"^{line}"):
        TrainLoop(run, Observers([])).run()


def _gpt(corpus: Path, *argv: object, code: int = 0) -> str:
    """What the command says: on stdout, or where it fails on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["gpt", "--data-path", str(corpus), *TRAINING, *map(str, argv)])
    assert left.value.code == code, err.getvalue()
    return out.getvalue() if code == 0 else err.getvalue()


def test_the_first_line_says_whose_weights_a_run_begins_with(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    assert _gpt(corpus, *MODEL, "--save", before).splitlines()[0].endswith("| from new weights")
    weights = f"from the weights of {before / 'iter_0000004'}"
    tuned = _gpt(corpus, "--load", before, "--finetune", "--no-load-rng")
    assert tuned.splitlines()[0].endswith(f"| {weights}")
    script = ["--pretrained-checkpoint", before, "--load", after, "--save", after, "--exit-interval", "2"]
    with caplog.at_level(logging.WARNING):
        assert weights in _gpt(corpus, *script).splitlines()[0]
    assert caplog.messages == [
        f"{after} contains no checkpoint yet: the run starts with the weights of {before}"
    ]
    assert _gpt(corpus, *script).splitlines()[0].endswith("| from iteration 2"), "then its own come first"
    assert [e["iteration"] for e in read_events(after) if e["event"] == "train_start"] == [0, 2]
