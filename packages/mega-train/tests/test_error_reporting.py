"""The rank that reports an error, and torchrun's error file."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from mega_model.distributed.mesh import Mesh
from mega_schema.app.cli_runner import run_command
from mega_schema.errors import ConfigError
from mega_train.checkpointing.async_save import CheckpointSaver
from mega_train.config import CheckpointConfig
from mega_train.engine.train import _report_early_exit
from mega_train.fault_tolerance.error_reporting import REPORT_DELAY, SingleRankErrors

PAIR = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:23704: "
    "Connection reset by peer. This is typically caused by a remote worker"
)


@click.group(cls=SingleRankErrors)
def app() -> None:
    """Ends as it is told."""


@app.command()
def mistake() -> None:
    raise ConfigError("key", "is wrong")


@app.command()
def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def sleep_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def _exit_code(word: str, rank: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as left:
        run_command(app, [word])
    return left.value.code


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("word", "line"), [("mistake", "error: key: is wrong"), ("nothing", "error: No such command 'nothing'.")]
)
def test_torchrun_finds_the_line_of_a_mistake(
    word: str,
    line: str,
    rank: int,
    sleep_seconds: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    assert _exit_code(word, rank, tmp_path / "error.json", monkeypatch) == 2
    assert capsys.readouterr().err == f"{line}\n"
    assert sleep_seconds == [REPORT_DELAY] * rank
    failure = ProcessFailure(rank, 7, 2, str(tmp_path / "error.json"))
    assert f"traceback : {line}\n" in str(ChildFailedError("mega_train", {rank: failure}))


@pytest.mark.parametrize(("rank", "message"), [(0, "\ninterrupted\n"), (1, "")])
def test_an_interruption_is_said_by_the_first_rank_alone(
    rank: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _exit_code("interrupt", rank, tmp_path / "error.json", monkeypatch) == 130
    assert capsys.readouterr().err == message


def _trainer(saved_at: int | None, save: str | None = "runs/a", interval: int | None = None) -> Any:
    config = CheckpointConfig(save=None if save is None else Path(save), interval=interval)
    saver = CheckpointSaver(config, Mesh(), saved_at)
    return SimpleNamespace(state=SimpleNamespace(iteration=7), saver=saver)


@pytest.mark.parametrize(
    ("saves", "hint"),
    [
        ((5, "runs/a", 5), "resume with --load runs/a (iteration 5)"),
        ((None, None, None), "nothing was saved: --save RUN --save-interval N saves every N iterations"),
        ((None, "runs/a", None), "nothing was saved: --save-interval N saves every N iterations"),
        ((None, "runs/a", 10), "nothing was saved yet: --save-interval is 10"),
    ],
)
def test_a_run_that_was_ended_says_where_it_stood_and_how_to_go_on(
    saves: tuple[int | None, str | None, int | None], hint: str
) -> None:
    with (
        pytest.raises(KeyboardInterrupt, match=f"after iteration 7; {re.escape(hint)}$"),
        _report_early_exit(_trainer(*saves), None),
    ):
        raise KeyboardInterrupt


def test_a_lost_rank_is_the_watchdogs_matter() -> None:
    content: list[Exception] = []
    watchdog: Any = SimpleNamespace(on_peer_lost=content.append)
    error = RuntimeError(PAIR)
    with _report_early_exit(_trainer(None), watchdog):
        raise error
    assert content == [error]


def test_an_error_of_ours_keeps_its_traceback() -> None:
    watchdog: Any = SimpleNamespace(on_peer_lost=pytest.fail)
    with pytest.raises(RuntimeError, match="shapes"), _report_early_exit(_trainer(None), watchdog):
        raise RuntimeError("shapes cannot be multiplied")
