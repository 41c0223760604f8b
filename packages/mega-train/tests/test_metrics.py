"""The record of a run, its picture, and what a person sees of it."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from mega_schema.errors import ConfigError, FormatError
from mega_train.curve import draw
from mega_train.metrics import EVENTS, Progress, Record, only_run, read_events
from mega_train.screen import Quiet, Terminal

NOW = Progress(
    iteration=20,
    iterations=100,
    consumed_samples=80,
    loss=2.5,
    rate=3e-4,
    gradient_norm=1.25,
    skipped=0,
    loss_scale=1.0,
    step_seconds=0.5,
    tokens_per_second=12345.6,
    seconds=10.0,
)


def test_an_event_is_one_line_and_reads_back(tmp_path: Path) -> None:
    record = Record(tmp_path / "run")
    record.write("start", {"iteration": 0})
    record.progress(NOW)
    lines = (tmp_path / "run" / EVENTS).read_text("utf-8").splitlines()
    assert json.loads(lines[1]) == {"event": "train", **asdict(NOW)}
    assert read_events(tmp_path / "run") == [json.loads(line) for line in lines]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Record(None).progress(NOW)
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def second() -> None:
        with only_run(folder):
            Record(folder).write("start", {"iteration": 0})

    with only_run(folder):
        with pytest.raises(ConfigError) as caught:
            second()
        assert str(caught.value) == (
            f"--save: another run writes to this folder: found {folder}, wanted a folder of its own for "
            "every run that is going on; hint: wait for the other run, end it, or --save elsewhere"
        )
        with only_run(tmp_path / "other"):
            pass
    second()
    assert (folder / EVENTS).read_bytes() == b'{"event": "start", "iteration": 0}\n'


def test_where_the_file_system_cannot_lock_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unable(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unable)
    with caplog.at_level("INFO", "mega.train"), only_run(tmp_path):
        Record(tmp_path).write("start", {"iteration": 0})
    assert caplog.messages == [
        f"{tmp_path} cannot be locked (No locks available): nothing keeps a second run out"
    ]
    assert len(read_events(tmp_path)) == 1


def test_a_line_that_a_crash_cut_is_left_out_and_the_next_run_begins_a_new_one(tmp_path: Path) -> None:
    Record(tmp_path).write("start", {"iteration": 0})
    Record(tmp_path).progress(NOW)
    with (tmp_path / EVENTS).open("a") as out:
        out.write('{"event": "train", "iter')
    assert [e["event"] for e in read_events(tmp_path)] == ["start", "train"]
    Record(tmp_path).write("start", {"iteration": 20})
    assert [e["event"] for e in read_events(tmp_path)] == ["start", "train", "start"]


def test_steps_that_a_resume_did_again_are_told_once(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.write("start", {"iteration": 0})
    for iteration in (10, 20, 30):
        record.progress(replace(NOW, iteration=iteration, loss=1.0))
    again = Record(tmp_path)
    again.write("start", {"iteration": 20})
    again.progress(replace(NOW, iteration=30, loss=2.0))
    losses = [(e["iteration"], e["loss"]) for e in read_events(tmp_path) if e["event"] == "train"]
    assert losses == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_curve_is_a_png_of_several_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record = Record(tmp_path / name)
        record.write("start", {"iteration": 0})
        record.progress(NOW)
        record.write("validation", {"iteration": 20, "loss": 2.0})
    draw([tmp_path / "a", tmp_path / "b"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "loss.png"]


def test_a_curve_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        draw([tmp_path / "none"], tmp_path / "loss.png")
    assert str(caught.value) == f"{tmp_path / 'none'}: holds no record of a run: wanted {EVENTS}"
    Record(tmp_path).write("start", {"iteration": 0})
    with pytest.raises(FormatError, match="holds no loss yet"):
        draw([tmp_path], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_a_curve_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as caught:
        draw([tmp_path], tmp_path / "loss.png")
    assert str(caught.value) == 'curve: needs matplotlib; hint: pip install "mega-train[plot]"'


def _shown(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150)
    with Terminal(console, 100, 0) as screen:
        screen.say("[red] a headline")
        for iteration in range(1, 21):
            screen.step(iteration)
        screen.progress(NOW)
        screen.progress(replace(NOW, iteration=60, step_seconds=100.0))
        if not terminal:
            screen.progress(replace(NOW, iteration=80, skipped=3, loss_scale=65536.0))
            screen.progress(replace(NOW, iteration=100, skipped=20, loss=None, gradient_norm=None))
    return out.getvalue()


def test_plain_lines_appear_where_there_is_no_terminal() -> None:
    assert _shown(terminal=False) == (
        "[red] a headline\n"
        "iteration 20/100 | loss 2.5000 | lr 3.00e-04 | grad norm 1.25 | 12,346 tokens/s | 0:40 left\n"
        "iteration 60/100 | loss 2.5000 | lr 3.00e-04 | grad norm 1.25 | 12,346 tokens/s | 1:06:40 left\n"
        "iteration 80/100 | loss 2.5000 (3 skipped) | lr 3.00e-04 | grad norm 1.25 | loss scale 65536 | "
        "12,346 tokens/s | 0:10 left\n"
        "iteration 100/100 | no update (20 skipped) | lr 3.00e-04 | 12,346 tokens/s | 0:00 left\n"
    )


def test_a_terminal_shows_a_line_that_moves() -> None:
    shown = _shown(terminal=True)
    assert "20/100" in shown
    assert "loss 2.5000" in shown
    assert "iteration 20/100 |" not in shown
    assert "\x1b[" in shown


def test_the_ranks_beside_the_first_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Quiet()
    quiet.say("x")
    quiet.step(1)
    quiet.progress(NOW)
    assert capsys.readouterr() == ("", "")
