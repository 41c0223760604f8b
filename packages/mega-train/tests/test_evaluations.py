"""Evaluation of checkpoints by other programs, in the background."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_schema.errors import MegaError
from mega_train.config import CheckpointConfig, LoggingConfig, RunConfig
from mega_train.config.data import EvaluationConfig
from mega_train.resolve.logging import check_evaluations
from mega_train.telemetry.evaluations import EvaluationRunner
from mega_train.telemetry.events import (
    CheckpointSaved,
    EvaluationEnd,
    Event,
    Message,
    StepEnd,
    TrainExit,
    TrainStart,
)
from mega_train.telemetry.megatron_tags import MegatronTags

# writes a result with the number of the checkpoint's folder, or does what its first argument says
PROGRAM = """
import json, os, sys, time
mode, output = sys.argv[1], sys.argv[sys.argv.index("--output") + 1]
load = sys.argv[sys.argv.index("--load") + 1]
print("evaluating", load)
if mode == "fail":
    sys.exit("error: --data: no such file")
if mode == "hang":
    time.sleep(600)
record = {"task": "lambada", "convention": "strict", "metrics": {
    "accuracy": {"value": int(load[-3:]) / 1000}, "ranks": {"value": float("RANK" in os.environ)},
    "loss": {"value": float("inf")}}}
if mode == "empty":
    record = {}
open(output, "w").write(json.dumps(record))
"""
START = TrainStart(
    iteration=0,
    iterations=30,
    consumed_samples=0,
    family="gpt",
    parameters=1,
    layout={},
    world=1,
    global_batch_size=1,
    seq_length=1,
    device="cpu",
)


def build_save(iteration: int, error: str = "") -> CheckpointSaved:
    return CheckpointSaved(iteration=iteration, blocked_seconds=0.0, error=error)


def build_step(iteration: int) -> StepEnd:
    return StepEnd(
        iteration=iteration,
        consumed_samples=iteration,
        loss=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        skipped_samples=0,
        loss_scale=1.0,
        global_batch_size=1,
        seq_length=1,
        seconds=0.1,
    )


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """A function that returns a command line; its word says how the program behaves."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return lambda mode: f"{sys.executable} {tmp_path / 'program.py'} {mode}"


def build(run: Path, *commands: str, **keywords: Any) -> tuple[EvaluationRunner, list[Event]]:
    run.mkdir(exist_ok=True)
    events: list[Event] = []
    config = RunConfig(
        checkpoint=CheckpointConfig(save=run), evaluation=EvaluationConfig(interval=10, commands=commands)
    )
    return EvaluationRunner(config, events.append, **keywords), events


def wait_for(runner: EvaluationRunner, events: list[Event], count: int) -> None:
    end_time = time.monotonic() + 30
    while len(events) < count and time.monotonic() < end_time:
        runner.on_event(build_step(11))
        time.sleep(0.01)
    assert len(events) == count


def test_a_checkpoint_saved_at_a_validation_is_evaluated_while_the_run_goes_on(
    tmp_path: Path, program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    runner, events = build(tmp_path / "run", program("ok"))
    for event in (START, build_save(5), build_save(10, error="disk full")):
        runner.on_event(event)
    assert not (tmp_path / "run/evaluations").exists()
    runner.on_event(build_save(10))
    wait_for(runner, events, 1)
    (event,) = events
    assert isinstance(event, EvaluationEnd)
    assert (event.iteration, event.task) == (10, "lambada-strict")
    assert event.metrics == {"accuracy": 0.01, "ranks": 0.0}
    assert json.loads(Path(event.result).read_bytes())["task"] == "lambada"
    log = tmp_path / "run/evaluations/program.py-iter_0000010.log"
    assert log.read_text() == f"evaluating {tmp_path / 'run/iter_0000010'}\n"


def test_commands_run_one_after_another_and_a_failure_is_a_message(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    runner, events = build(tmp_path / "run", program("fail"), program("empty"), program("ok"))
    runner.on_event(START)
    runner.on_event(build_save(20))
    wait_for(runner, events, 3)
    texts = [event.text for event in events if isinstance(event, Message)]
    failure = "failed: exit code 1: error: --data: no such file; training continues"
    assert texts[0] == f"evaluation program.py-1-iter_0000020 {failure}"
    assert texts[1].startswith("evaluation program.py-2-iter_0000020 failed: 'metrics'")
    assert isinstance(events[2], EvaluationEnd)


def test_the_page_of_an_earlier_run_does_not_stop_an_evaluation(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    runner, events = build(tmp_path / "run", program("ok"))
    folder = tmp_path / "run/evaluations"
    folder.mkdir(parents=True)
    pages = [folder / f"{name}.html" for name in ("program.py-iter_0000010", "notes")]
    for page in pages:
        page.write_text("<!doctype html>")
    for event in (START, build_save(10)):
        runner.on_event(event)
    wait_for(runner, events, 1)
    assert [page.exists() for page in pages] == [False, True]


def test_a_program_that_cannot_start_is_a_message(tmp_path: Path) -> None:
    runner, events = build(tmp_path / "run", "no-such-program lambada")
    runner.on_event(build_save(10))
    assert events == [Message("evaluation lambada-iter_0000010 cannot start: No such file or directory")]


def test_a_finished_run_waits_for_its_last_evaluations(tmp_path: Path, program: Callable[[str], str]) -> None:
    runner, events = build(tmp_path / "run", program("ok"))
    runner.on_event(START)
    runner.on_event(build_save(20))
    runner.on_event(build_save(30))
    runner.close()
    assert [event.iteration for event in events if isinstance(event, EvaluationEnd)] == [20, 30]


def test_the_wait_has_an_end(tmp_path: Path, program: Callable[[str], str]) -> None:
    now = [0.0]
    runner, events = build(
        tmp_path / "run",
        program("hang"),
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + 100),
    )
    runner.on_event(START)
    runner.on_event(build_save(30))
    runner.close()
    assert now[0] == 600
    assert events == [Message("evaluations that were not finished: program.py-iter_0000030")]


def test_a_run_that_stops_early_ends_its_evaluations_at_once(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("it waited")

    runner, events = build(tmp_path / "run", program("hang"), sleep=sleep)
    for event in (START, build_save(10), build_save(20), TrainExit(iteration=25, reason="signal")):
        runner.on_event(event)
    runner.close()
    names = "program.py-iter_0000010, program.py-iter_0000020"
    assert events == [Message(f"evaluations that were not finished: {names}")]


def test_the_numbers_have_tags_of_their_own() -> None:
    event = EvaluationEnd(iteration=10, task="lambada-strict", metrics={"a": 0.5}, result="r", seconds=1.0)
    assert list(MegatronTags(LoggingConfig()).tags(event)) == [("mega-eval/lambada-strict/a", 0.5, 10)]


@pytest.mark.parametrize(
    ("commands", "checkpoint", "message"),
    [
        (("python x",), CheckpointConfig(), "--evaluation-commands: needs checkpoints: wanted --save"),
        (
            ("sh -c x",),
            CheckpointConfig(save=Path("run"), interval=15),
            "found --save-interval 15, --eval-interval 10, wanted --save-interval as a multiple",
        ),
        (("mega-evla x",), CheckpointConfig(save=Path("run")), "no such program: found mega-evla; hint: "),
        (("sh 'x",), CheckpointConfig(save=Path("run")), "not a command: found sh 'x, wanted no closing"),
        (("sh --load=x",), CheckpointConfig(save=Path("run")), "the run names checkpoint and result"),
    ],
)
def test_commands_that_cannot_run_are_refused_before_the_run(
    commands: tuple[str, ...], checkpoint: CheckpointConfig, message: str
) -> None:
    run = RunConfig(checkpoint=checkpoint, evaluation=EvaluationConfig(interval=10, commands=commands))
    errors: list[MegaError] = list(check_evaluations(run))
    assert len(errors) == 1
    assert message in str(errors[0])
    valid = CheckpointConfig(save=Path("run"), interval=30)
    commands = ("sh -c true",)
    run = RunConfig(checkpoint=valid, evaluation=EvaluationConfig(interval=10, commands=commands))
    assert list(check_evaluations(run)) == []
