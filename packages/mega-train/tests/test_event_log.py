"""The event log of a run, and the loss plot."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from mega_schema.errors import ConfigError, FormatError
from mega_train.reports.loss_plot import draw_loss
from mega_train.reports.run_names import name_runs
from mega_train.telemetry.event_log import EVENTS, EventLog, lock_run, read_events
from mega_train.telemetry.events import CheckpointSaved, LogLine, TrainExit, TrainStart, ValidationEnd

NOW = LogLine(
    iteration=20,
    iterations=100,
    consumed_samples=80,
    loss=2.5,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped=0,
    loss_scale=1.0,
    iteration_seconds=0.5,
    tokens_per_second=12345.6,
    seconds=10.0,
    global_batch_size=4,
    seq_length=16,
    tflops=1.5,
)


def began(iteration: int) -> TrainStart:
    return TrainStart(
        iteration=iteration,
        iterations=100,
        consumed_samples=4 * iteration,
        family="gpt",
        parameters=1000,
        layout={"tp": 1, "pp": 1, "dp": 1},
        world=1,
        global_batch_size=4,
        seq_length=16,
        device="cpu",
    )


def validation_event(iteration: int, loss: float) -> ValidationEnd:
    return ValidationEnd(
        iteration=iteration, consumed_samples=4 * iteration, loss=loss, perplexity=7.0, seconds=1.0
    )


def test_an_event_is_one_line_and_reads_back(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "run")
    record.on_event(began(0))
    record.on_event(NOW)
    lines = (tmp_path / "run" / EVENTS).read_text("utf-8").splitlines()
    assert json.loads(lines[1]) == {"event": "train_log", **asdict(NOW)}
    assert read_events(tmp_path / "run") == [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("event", "record"),
    [
        (
            replace(
                NOW,
                mfu=0.5,
                memory={"peak": 7},
                timers={"optimizer": 0.1},
                loss_terms={"lm loss": 2.0, "sop loss": 0.5},
                extra={"num-zeros": 3.0},
            ),
            {
                **{"event": "train_log", "iteration": 20, "iterations": 100, "consumed_samples": 80},
                **{"consumed_tokens": 0, "loss": 2.5, "learning_rate": 3e-4, "grad_norm": 1.25, "skipped": 0},
                **{
                    "loss_scale": 1.0,
                    "iteration_seconds": 0.5,
                    "tokens_per_second": 12345.6,
                    "seconds": 10.0,
                },
                **{"global_batch_size": 4, "seq_length": 16, "tflops": 1.5, "mfu": 0.5, "time": 0.0},
                **{"memory": {"peak": 7}, "timers": {"optimizer": 0.1}, "timers_of_ranks": {}},
                "loss_terms": {"lm loss": 2.0, "sop loss": 0.5},
                "extra": {"num-zeros": 3.0},
            },
        ),
        (
            replace(validation_event(20, 1.5), split="test"),
            {
                **{"event": "validation", "split": "test", "iteration": 20, "consumed_samples": 80},
                **{"loss": 1.5, "loss_terms": {}, "perplexity": 7.0, "metrics": {}, "seconds": 1.0},
            },
        ),
        (
            CheckpointSaved(
                iteration=20, blocked_seconds=0.5, wait_seconds=0.25, write_seconds=2.0, error="No space"
            ),
            {
                **{"event": "checkpoint", "iteration": 20, "blocked_seconds": 0.5, "wait_seconds": 0.25},
                **{"write_seconds": 2.0, "error": "No space"},
            },
        ),
        (
            TrainExit(iteration=20, reason="signal"),
            {"event": "train_exit", "iteration": 20, "reason": "signal"},
        ),
    ],
    ids=["train_log", "validation", "checkpoint", "train_exit"],
)
def test_a_record_has_the_name_and_the_fields_of_its_event(
    tmp_path: Path, event: LogLine | ValidationEnd | CheckpointSaved | TrainExit, record: dict[str, Any]
) -> None:
    EventLog(tmp_path).on_event(event)
    assert json.loads((tmp_path / EVENTS).read_text("utf-8")) == record


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def second() -> None:
        with lock_run(folder):
            EventLog(folder).on_event(began(0))

    with lock_run(folder):
        with pytest.raises(ConfigError) as caught:
            second()
        assert str(caught.value) == (
            f"--save: another process writes to this folder: found {folder}, wanted one writer at a time, "
            "a run or mega-ckpt; hint: wait for it, end it, or --save elsewhere"
        )
        with lock_run(tmp_path / "other"):
            pass
    second()
    assert [e["event"] for e in read_events(folder)] == ["train_start"]


def test_where_the_file_system_cannot_lock_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unable(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unable)
    with caplog.at_level("INFO", "mega.schema"), lock_run(tmp_path):
        EventLog(tmp_path).on_event(began(0))
    line = f"{tmp_path} cannot be locked (No locks available): a second writer would not be detected"
    assert caplog.messages == [line, line], "the folder and the record"
    assert len(read_events(tmp_path)) == 1


def test_a_line_that_a_crash_cut_is_left_out_and_the_next_run_begins_a_new_one(tmp_path: Path) -> None:
    EventLog(tmp_path).on_event(began(0))
    EventLog(tmp_path).on_event(NOW)
    with (tmp_path / EVENTS).open("a") as out:
        out.write('{"event": "train_log", "iter')
    assert [e["event"] for e in read_events(tmp_path)] == ["train_start", "train_log"]
    EventLog(tmp_path).on_event(began(20))
    assert [e["event"] for e in read_events(tmp_path)] == ["train_start", "train_log", "train_start"]


def test_steps_repeated_after_a_resume_are_reported_once(tmp_path: Path) -> None:
    record = EventLog(tmp_path)
    record.on_event(began(0))
    for iteration in (10, 20, 30):
        record.on_event(replace(NOW, iteration=iteration, loss=1.0))
    second = EventLog(tmp_path)
    second.on_event(began(20))
    second.on_event(replace(NOW, iteration=30, loss=2.0))
    losses = [(e["iteration"], e["loss"]) for e in read_events(tmp_path) if e["event"] == "train_log"]
    assert losses == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_curve_is_a_png_of_several_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record = EventLog(tmp_path / name)
        record.on_event(began(0))
        record.on_event(NOW)
        record.on_event(validation_event(20, 2.0))
    draw_loss([tmp_path / "a", tmp_path / "b"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "loss.png"]


def _draw_curves(
    monkeypatch: pytest.MonkeyPatch, runs: list[Path], output: Path
) -> dict[str, tuple[str, list[float]]]:
    """What `draw_loss` puts into the picture: look and values of each line by its name in the legend."""
    figures: list[Figure] = []
    make = Figure.subplots

    def remember(self: Figure, *args: Any, **kwargs: Any) -> Any:
        figures.append(self)
        return make(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "subplots", remember)
    draw_loss(runs, output)
    (axes,) = figures[0].axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    return {
        name: (f"{line.get_linestyle()} {line.get_markerfacecolor()}", list(line.get_ydata()))
        for name, line in zip(names, axes.get_lines(), strict=True)
    }


def test_a_curve_draws_the_test_apart_from_validations_and_names_runs_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [tmp_path / "s1" / "$run", tmp_path / "s2" / "$run", tmp_path / "_run"]
    for run in runs:
        record = EventLog(run)
        record.on_event(began(0))
        record.on_event(NOW)
        record.on_event(validation_event(20, 2.0))
        record.on_event(replace(validation_event(20, 1.5), split="test"))
    lines = _draw_curves(monkeypatch, runs, tmp_path / "loss.png")
    assert list(lines) == [
        f"{run}: {group}"
        for run in ("s1/$run", "s2/$run", "_run")
        for group in ("training", "validation", "test")
    ]
    colors = [lines[f"{run}: training"][0].removeprefix("- ") for run in ("s1/$run", "s2/$run", "_run")]
    assert len(set(colors)) == 3
    assert lines["s1/$run: validation"] == (f"-- {colors[0]}", [2.0])
    assert lines["s1/$run: test"] == ("-- #ffffff", [1.5]), "a ring"


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/a/x", "/a/y"], ["x", "y"]),
        (["/a/run", "/b/run", "/b/other"], ["a/run", "b/run", "other"]),
        (["/a/m/run", "/b/m/run"], ["a/m/run", "b/m/run"]),
        (["/m/run", "/b/m/run"], ["/m/run", "b/m/run"]),
        (["/a/run", "/a/run"], ["run (1)", "run (2)"]),
    ],
)
def test_runs_have_the_shortest_names_that_tell_them_apart(folders: list[str], names: list[str]) -> None:
    assert name_runs([Path(folder) for folder in folders]) == names


def test_a_curve_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        draw_loss([tmp_path / "none"], tmp_path / "loss.png")
    assert str(caught.value) == f"{tmp_path / 'none'}: contains no event log of a run: wanted {EVENTS}"
    EventLog(tmp_path).on_event(began(0))
    with pytest.raises(FormatError, match="contains no loss yet"):
        draw_loss([tmp_path], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_a_curve_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as caught:
        draw_loss([tmp_path], tmp_path / "loss.png")
    assert str(caught.value) == 'curve: needs matplotlib; hint: pip install -e "packages/mega-train[plot]"'


def test_a_record_that_cannot_be_written_misses_events_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = EventLog(tmp_path)
    record.on_event(began(0))
    opened = Path.open

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            with opened(tmp_path / EVENTS, "a") as out:
                out.write(text[:9])  # as much as there is room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda *_, **__: Full())
        record.on_event(NOW)
        record.on_event(NOW)
    assert caplog.messages == [f"{tmp_path / EVENTS}: some events were not written: No space left on device"]
    record.on_event(validation_event(20, 2.0))
    assert [e["event"] for e in read_events(tmp_path)] == ["train_start", "validation"]


def test_a_file_without_an_event_is_no_event_log(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text("garbage\n")
    with pytest.raises(FormatError, match=rf"{EVENTS}:1: is not a line of an event log: wanted JSON"):
        read_events(tmp_path)
