"""Exit conditions of a run; it always saves before it exits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Protocol

import pytest

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer
from mega_train.fault_tolerance.exit_conditions import (
    DURATION,
    INTERVAL,
    KILL_SWITCH,
    LAST_ITERATION,
    SIGTERM,
    SIGUSR1,
    ExitConditions,
)
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.event_log import EventLog, read_events
from mega_train.telemetry.events import Event, Message, ValidationEnd
from mega_train.telemetry.observers import Observers


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


class RecordingObserver:
    """Remembers what was said, and that there was a validation."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_event(self, event: Event) -> None:
        match event:
            case Message():
                self.messages.append(event.text)
            case ValidationEnd():
                self.messages.append(f"validation at iteration {event.iteration}")

    def close(self) -> None:
        pass


def test_a_run_leaves_for_its_last_iteration_and_where_the_interval_divides(
    resolve_config: ResolveConfig,
) -> None:
    leaving = ExitConditions(resolve_config(train__exit_interval=4), Mesh())
    assert [leaving.check_after_step(i) for i in (3, 4, 5, 8, 9, 10, 11)] == [
        None,
        INTERVAL,
        None,
        INTERVAL,
        None,
        LAST_ITERATION,
        LAST_ITERATION,
    ]
    assert leaving.check_before_run(4) is None, "a run that goes on from there has left there once"
    assert leaving.check_before_run(10) is LAST_ITERATION


def test_minutes_count_from_when_the_run_began(resolve_config: ResolveConfig) -> None:
    ticks = iter([60.0, 119.0, 121.0])
    leaving = ExitConditions(
        resolve_config(train__exit_duration_in_mins=2.0), Mesh(), start_time=0.0, clock=lambda: next(ticks)
    )
    assert [leaving.check_after_step(i) for i in (1, 2, 3)] == [None, None, DURATION]


def test_what_ends_a_run_from_outside_is_before_what_it_planned(
    resolve_config: ResolveConfig, tmp_path: Path
) -> None:
    switch, received = tmp_path / "stop", list[signal.Signals]()
    plan = resolve_config(
        train__kill_switch_path=str(switch), train__exit_duration_in_mins=1.0, train__exit_interval=1
    )
    leaving = ExitConditions(
        plan,
        Mesh(),
        received_signal=lambda: received[0] if received else None,
        start_time=0.0,
        clock=lambda: 100.0,
    )
    assert leaving.check_after_step(10) is DURATION
    switch.touch()
    assert leaving.check_after_step(10) is KILL_SWITCH
    assert leaving.check_before_run(0) is KILL_SWITCH
    received.append(signal.SIGUSR1)
    assert leaving.check_after_step(10) is SIGUSR1
    received[0] = signal.SIGTERM
    assert leaving.check_after_step(10) is SIGTERM


def _run_loop(
    resolve_config: ResolveConfig,
    corpus: IndexedDataset,
    folder: Path,
    received_signal: Any = None,
    **values: Any,
) -> tuple[Trainer, Any, RecordingObserver]:
    plan = resolve_config(
        checkpoint__save=str(folder), data__split="80,20,0", evaluation__eval_iters=1, **values
    )
    trainer, screen = Trainer(plan, Mesh(), corpus), RecordingObserver()
    leaving = ExitConditions(
        plan, Mesh(), received_signal=received_signal and (lambda: received_signal(trainer))
    )
    return (
        trainer,
        TrainLoop(trainer, Observers([EventLog(folder), screen]), exit_conditions=leaving).run(),
        screen,
    )


def test_a_kill_switch_saves_and_leaves_and_the_line_says_how_to_go_on(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    switch = tmp_path / "stop"

    def step_three(trainer: Trainer) -> None:
        if trainer.state.iteration == 3:
            switch.touch()

    run, reason, screen = _run_loop(
        resolve_config, open_corpus, tmp_path / "run", step_three, train__kill_switch_path=str(switch)
    )
    assert (run.state.iteration, reason, reason.code) == (3, KILL_SWITCH, 0)
    assert Checkpoint.open(tmp_path / "run").iteration == 3
    assert screen.messages[-1] == (
        "exiting after iteration 3: the file of --kill-switch-path exists; "
        f"resume with --load {tmp_path / 'run'} (iteration 3)"
    )
    assert read_events(tmp_path / "run")[-1] == {
        "event": "train_exit",
        "iteration": 3,
        "reason": "kill switch",
    }
    second, reason, _ = _run_loop(
        resolve_config, open_corpus, tmp_path / "other", train__kill_switch_path=str(switch)
    )
    assert (second.state.iteration, reason) == (0, KILL_SWITCH), "nothing begins while it is there"
    assert not list((tmp_path / "other").glob("iter_*"))


def test_a_signal_saves_at_once_and_leaves_with_its_code(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    run, reason, screen = _run_loop(
        resolve_config,
        open_corpus,
        tmp_path,
        lambda trainer: signal.SIGTERM if trainer.state.iteration == 4 else None,
        evaluation__eval_interval=2,
    )
    assert (run.state.iteration, reason, reason.code) == (4, SIGTERM, 143)
    assert Checkpoint.open(tmp_path).iteration == 4
    assert [text.split(" | ")[0] for text in screen.messages] == [
        "validation at iteration 2",
        screen.messages[-1],
    ], "the validation that was due is left out"
    assert screen.messages[-1] == (
        f"exiting after iteration 4: received SIGTERM; resume with --load {tmp_path} (iteration 4)"
    )


def test_a_duration_that_is_none_is_refused(resolve_config: ResolveConfig) -> None:
    with pytest.raises(ConfigError, match=r"^--exit-duration-in-mins: not a time: found 0.0, wanted more"):
        resolve_config(train__exit_duration_in_mins=0.0)
