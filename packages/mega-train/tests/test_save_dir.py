"""No checkpoint is overwritten by mistake: a run checks its --save folder first."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mega_schema.checkpoint.checkpoint_dir import LATEST, MANIFEST, iterations, pending_tracker
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.errors import FormatError
from mega_train.cli import main
from mega_train.telemetry.event_log import read_lines

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"]
TRAINING = ["--global-batch-size", "4", "--lr", "0.01", "--lr-decay-iters", "8"]
SAVES = ["--eval-iters", "0", "--save-interval", "2"]
PIECE = "model-00000.safetensors"


def _gpt(corpus: Path, *argv: object, code: int = 0) -> str:
    """What a run says on stdout, or if it is refused, on stderr."""
    out, err = io.StringIO(), io.StringIO()
    words = ["gpt", "--data-path", str(corpus), *MODEL, *TRAINING, *SAVES, *map(str, argv)]
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == code, err.getvalue()
    if code:
        assert err.getvalue().startswith("error: ")
        assert err.getvalue().count("\n") == 1
    return err.getvalue() if code else out.getvalue()


@pytest.fixture(scope="module")
def trained_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps that saved at 2, 4 and 6."""
    run = tmp_path_factory.mktemp("trained") / "run"
    _gpt(corpus, "--train-iters", 6, "--save", run)
    return run


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def _contents(run: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in run.rglob("*")
        if file.is_file() and file.name != "events.jsonl"
    }


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


TRACKERS = {
    "gone": (None, f"has no {LATEST}: found checkpoints up to iteration 6"),
    "empty": (b"", f"{LATEST}: content: found '', wanted an iteration number"),
    "a word": (b"banana\n", f"{LATEST}: content: found 'banana', wanted an iteration number"),
    "not UTF-8": (b"\xff\xfe6", f"{LATEST}: content: found"),
    "many digits": (b"6" * 5000, f"{LATEST}: content: found"),
    "a missing iteration": (b"5\n", "iter_0000005: is not a Mega checkpoint: found no manifest.json"),
    "a later one": (b"99\n", "iter_0000099: is not a Mega checkpoint: found no manifest.json"),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_without_a_usable_tracker_the_newest_sound_checkpoint_is_taken_and_one_line_says_so(
    corpus: Path, run: Path, tracker: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, message = TRACKERS[tracker]
    (run / LATEST).unlink()
    if content is not None:
        (run / LATEST).write_bytes(content)
    before = _contents(run)
    out = _gpt(corpus, "--train-iters", 8, "--load", run, "--save", run)
    assert "from iteration 6" in out
    (line,) = caplog.messages
    assert message in line
    assert line.endswith("; the run resumes from iteration 6, the newest intact checkpoint")
    assert "hint" not in line
    assert Checkpoint.open(run).iteration == 8
    after = _contents(run)
    assert all(after[name] == data for name, data in before.items() if name != LATEST)


def test_a_tracker_that_is_a_folder_is_no_tracker(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / LATEST).unlink()
    (run / LATEST).mkdir()
    assert "from iteration 6" in _gpt(corpus, "--train-iters", 6, "--load", run, "--save", run.parent / "new")
    assert len(caplog.messages) == 1


def test_without_a_tracker_a_damaged_newest_is_passed_over(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / LATEST).unlink()
    _flip(run / "iter_0000006" / PIECE)
    _flip(run / "iter_0000006/optim.exp_avg-00000.safetensors")
    assert "from iteration 4" in _gpt(corpus, "--train-iters", 6, "--load", run, "--save", run)
    assert any("iter_0000006" in line for line in caplog.messages)
    assert Checkpoint.open(run).iteration == 6


def test_without_tracker_and_checkpoint_a_run_begins_anew(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    (run / ".iter_0000002.partial").mkdir(parents=True)
    _gpt(corpus, "--train-iters", 2, "--load", run, "--save", run)
    assert caplog.messages == [f"{run} contains no checkpoint yet: the run starts from new weights"]
    assert Checkpoint.open(run).iteration == 2


def test_a_tracker_alone_is_an_error_that_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("banana")
    line = _gpt(corpus, "--train-iters", 2, "--load", tmp_path, "--save", tmp_path, code=2)
    assert "content: found 'banana', wanted an iteration number" in line
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]


def test_a_fresh_run_does_not_write_into_a_folder_with_checkpoints(
    corpus: Path, run: Path, tmp_path: Path
) -> None:
    before = _contents(run)
    begins = ([], ["--load", tmp_path / "other"], ["--load", run, "--finetune"])
    _gpt(corpus, "--train-iters", 2, "--save", tmp_path / "other")
    for words in begins:
        line = _gpt(corpus, "--train-iters", 8, *words, "--save", run, code=2)
        assert "--save: contains checkpoints that this run does not load: found iterations 2, 4, 6 in" in line
        assert f"--load {run} --save {run} resumes from them" in line
        assert "--overwrite" in line
    assert _contents(run) == before


def test_overwrite_lets_a_fresh_run_take_the_place_of_the_checkpoints_as_it_passes_them(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--overwrite", "--lr", "0.02")
    out = _gpt(corpus, "--train-iters", 3, "--save", run, *words)
    assert "from iteration" not in out
    (line,) = caplog.messages
    assert "iterations 2, 4, 6" in line
    assert iterations(run) == [2, 3], "no chimera: those of the earlier run are not seen any more"
    assert (run / "iter_0000004.superseded" / MANIFEST).is_file(), "not passed yet"
    assert (run / "iter_0000006.superseded" / MANIFEST).is_file()
    assert "overwrite = false" in (run / "iter_0000003/run.toml").read_text("utf-8"), "not said again"
    _gpt(
        corpus,
        "--train-iters",
        5,
        "--load",
        run,
        "--save",
        run,
        "--lr",
        "0.02",
        "--override-opt_param-scheduler",
    )
    assert iterations(run) == [2, 3, 4, 5]
    assert sorted(path.name for path in run.glob("*.superseded")) == ["iter_0000006.superseded"]


def test_a_run_that_goes_back_does_not_write_over_later_checkpoints(corpus: Path, run: Path) -> None:
    before = _contents(run)
    line = _gpt(corpus, "--train-iters", 6, "--load", run / "iter_0000002", "--save", run, code=2)
    assert "--save: contains checkpoints after the one loaded: found iterations 4, 6 in" in line
    assert "wanted none after iteration 2" in line
    assert f"--load {run} " in line
    assert "--overwrite" in line
    assert _contents(run) == before
    (run / LATEST).write_text("2\n")
    line = _gpt(corpus, "--train-iters", 6, "--load", run, "--save", run, code=2)
    assert "found iterations 4, 6 in" in line
    assert f"echo 6 > {run / LATEST}" in line


def test_overwrite_goes_back_and_a_later_start_needs_it_no_more(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / LATEST).write_text("2\n")
    words = ("--load", run, "--save", run)
    assert "from iteration 2" in _gpt(corpus, "--train-iters", 6, *words, "--exit-interval", 3, "--overwrite")
    assert iterations(run) == [2, 3]
    caplog.clear()
    assert "from iteration 3" in _gpt(corpus, "--train-iters", 6, *words)
    assert caplog.messages == []
    assert iterations(run) == [2, 3, 4, 6]
    assert not list(run.glob("*.superseded"))


def test_a_damaged_newest_is_set_aside_once_there_is_another_and_restarts_go_on(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "iter_0000006" / MANIFEST).write_text("")
    words = ("--train-iters", 6, "--load", run, "--save", run)
    assert "from iteration 4" in _gpt(corpus, *words, "--exit-interval", 5)
    assert iterations(run) == [2, 4, 5]
    assert (run / "iter_0000006.superseded").is_dir()
    caplog.clear()
    assert "from iteration 5" in _gpt(corpus, *words)
    assert caplog.messages == []
    assert iterations(run) == [2, 4, 5, 6]
    assert not list(run.glob("*.superseded"))


def test_another_path_to_the_same_folder_is_the_same_folder(corpus: Path, run: Path) -> None:
    link = run.parent / "link"
    link.symlink_to(run)
    before = _contents(run)
    assert "from iteration 6" in _gpt(corpus, "--train-iters", 6, "--load", link, "--save", run)
    assert _contents(run) == before, "nothing was left to train, and nothing is saved again"
    empty = run.parent / "empty"
    empty.mkdir()
    (run.parent / "to_empty").symlink_to(empty)
    _gpt(corpus, "--train-iters", 2, "--load", run.parent / "to_empty", "--save", empty)


def test_folders_of_another_program_are_not_written_over(corpus: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "run/iter_0000002/mp_rank_00"
    foreign.mkdir(parents=True)
    (foreign / "model_optim_rng.pt").write_bytes(b"x")
    for words in ((), ("--overwrite",)):
        line = _gpt(corpus, "--train-iters", 4, "--save", tmp_path / "run", *words, code=2)
        assert "iter_0000002" in line
        assert "contains something other than a Mega checkpoint" in line
    # --load would convert it, to a folder beside --save
    line = _gpt(corpus, "--train-iters", 4, "--save", tmp_path / "run", "--load", tmp_path / "run", code=2)
    assert "--save: contains a checkpoint of another program: found a Megatron-LM checkpoint" in line
    assert foreign.is_dir()


def test_a_file_of_another_program_is_not_taken_for_the_record_of_a_run(corpus: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    save.mkdir()
    (save / "events.jsonl").write_text('{"mine": 1}\n')
    result = _gpt(corpus, "--train-iters", 1, "--save", save, code=2)
    assert (
        f'{save / "events.jsonl"}:1: is not a line of an event log: wanted an object with a key "event"'
        in result
    )
    assert _contents(save) == {}
    assert (save / "events.jsonl").read_text() == '{"mine": 1}\n'
    with pytest.raises(FormatError, match="is not a line of an event log"):
        read_lines(save)


def test_a_commit_that_was_killed_before_its_tracker_is_completed(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / LATEST).write_text("4\n")
    pending_tracker(run).write_text("6\n")
    os.utime(run / LATEST, (1, 1))
    assert Checkpoint.open(run).iteration == 6
    assert "from iteration 6" in _gpt(corpus, "--train-iters", 8, "--load", run, "--save", run)
    assert caplog.messages == []
    assert Checkpoint.open(run).iteration == 8
    assert not pending_tracker(run).exists()


def test_scoring_alone_may_have_any_save_folder(corpus: Path, run: Path) -> None:
    before = _contents(run)
    words = ("--skip-train", "--split", "50,50,0", "--eval-iters", 1)
    _gpt(corpus, "--train-iters", 6, "--load", run / "iter_0000002", "--save", run, *words)
    assert _contents(run) == before


def test_an_empty_save_is_not_the_working_directory(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = _gpt(corpus, "--train-iters", 2, "--save", "", code=2)
    assert line.startswith("error: --save: is empty: wanted a path; hint: ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_does_not_begin_where_another_process_writes(corpus: Path, tmp_path: Path) -> None:
    partial = tmp_path / "run/.iter_0000002.partial"
    partial.mkdir(parents=True)
    with lock_run_folder(tmp_path / "run"):
        line = _gpt(corpus, "--train-iters", 2, "--save", tmp_path / "run", code=2)
    assert "--save: another process writes to this folder" in line
    assert partial.is_dir()
