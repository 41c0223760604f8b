"""If the newest checkpoint is damaged, the run resumes from the previous one or reports the error."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_schema.checkpoint.checkpoint_dir import FORMAT, LATEST, MANIFEST, TRAINER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import DIGEST, replace_manifest, rewrite_checksums
from mega_schema.parallel_layout import Layout
from mega_train.checkpointing.resume import agree_on_checkpoint
from mega_train.cli import main
from mega_train.config import CheckpointConfig, RunConfig

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"]
TRAINING = ["--global-batch-size", "4", "--lr", "0.01", "--eval-iters", "0", "--fp16"]
PIECE = "optim.exp_avg-00000.safetensors"


def _gpt(corpus: Path, *argv: object, code: int = 0) -> str:
    """What a run says on stdout, or if it is refused, on stderr."""
    out, err = io.StringIO(), io.StringIO()
    words = ["gpt", "--data-path", str(corpus), *MODEL, *TRAINING, *map(str, argv)]
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


@pytest.fixture(scope="module")
def trained_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps that saved at 2, 4 and 6."""
    run = tmp_path_factory.mktemp("trained") / "run"
    _gpt(corpus, "--train-iters", 6, "--save", run, "--save-interval", 2)
    return run


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def _edit(file: Path, **values: Any) -> None:
    """Change a file and its checksums, as a faulty writer would."""
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), "utf-8")
    rewrite_checksums(file.parent, values.get("format", FORMAT))


def _change_digits(file: Path, key: str) -> None:
    """Change the digits of one number, as an editor would."""
    text = file.read_text("utf-8")
    value = str(json.loads(text)[key])
    assert (before := f'"{key}": {value}') in text
    file.write_text(text.replace(before, f'"{key}": {int(value) + 1}'), "utf-8")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda f: _flip(f / PIECE), "values are not those that were written"),
    "a truncated piece": (lambda f: os.truncate(f / PIECE, 100), "size in bytes: found 100"),
    "a missing piece": (lambda f: (f / PIECE).unlink(), "missing file of a checkpoint"),
    "a missing manifest": (
        lambda f: (f / MANIFEST).unlink(),
        f"{MANIFEST}: missing: wanted a file of a checkpoint",
    ),
    "an empty manifest": (
        lambda f: (f / MANIFEST).write_text(""),
        f"{MANIFEST}: differs from what was written: sha256: found e3b0c442",
    ),
    "a manifest of another model": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace("1e-05", "1e-03")),
        f"{MANIFEST}: differs from what was written: sha256: found",
    ),
    "a missing digest": (lambda f: (f / DIGEST).unlink(), f"{DIGEST}: missing"),
    "edited samples": (
        lambda f: _change_digits(f / TRAINER, "consumed_samples"),
        f"{TRAINER}: differs from what was written: sha256: found",
    ),
    "edited optimizer steps": (
        lambda f: _change_digits(f / TRAINER, "optimizer_steps"),
        f"{TRAINER}: differs from what was written: sha256: found",
    ),
    "a configuration that is no text": (
        lambda f: (f / "run.toml").write_bytes(b"\xff" + (f / "run.toml").read_bytes()[1:]),
        "run.toml: differs from what was written: sha256: found",
    ),
    "another tokenizer": (
        lambda f: (f / "tokenizer/identity.json").write_text("{}"),
        "tokenizer/identity.json: differs from what was written: bytes: found 2",
    ),
    "a file more in the tokenizer": (
        lambda f: (f / "tokenizer/chat_template.jinja").write_text("x"),
        "tokenizer/chat_template.jinja: has no checksum in the manifest",
    ),
    "a trainer.json that is a pipe": (
        lambda f: ((f / TRAINER).unlink(), os.mkfifo(f / TRAINER)),
        f"{TRAINER}: is not a regular file: found a pipe",
    ),
    "a piece that is a link": (
        lambda f: (f / PIECE).rename(f / "x") and (f / PIECE).symlink_to(f / "x"),
        f"{PIECE}: is not a regular file: found a link",
    ),
    "a missing folder": (shutil.rmtree, "is not a Mega checkpoint"),
    "a missing trainer.json": (lambda f: (f / TRAINER).unlink(), f"{TRAINER}: missing"),
    "no samples": (
        lambda f: _edit(f / TRAINER, consumed_samples="many"),
        "consumed_samples: not a count: found many, wanted 0 or more",
    ),
    "a loss scale without a value": (
        lambda f: _edit(f / TRAINER, loss_scale={"growth_tracker": 1, "hysteresis_tracker": 2}),
        "loss_scale: not that of a run: found {'growth_tracker': 1, 'hysteresis_tracker': 2}, wanted a value "
        "above 0, and the counts growth_tracker and hysteresis_tracker",
    ),
    "a loss scale of 0": (
        lambda f: _edit(f / TRAINER, loss_scale={"value": 0, "growth_tracker": 1, "hysteresis_tracker": 2}),
        "loss_scale: not that of a run",
    ),
    "a loss scale that is a number": (
        lambda f: _edit(f / TRAINER, loss_scale=65536.0),
        "loss_scale: not that of a run: found 65536.0",
    ),
    "schedules without their values": (
        lambda f: _edit(f / TRAINER, lr_schedule={}, wd_schedule={}),
        "lr_schedule and wd_schedule: not schedules of a run: found ",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_with_the_same_result(
    corpus: Path, trained_run: Path, run: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm, message = DAMAGES[damage]
    harm(run / "iter_0000006")
    out = _gpt(corpus, "--train-iters", 6, "--load", run, "--save", run)
    assert "from iteration 4" in out
    (warning,) = caplog.messages
    assert message in warning
    which = "the newest intact checkpoint" if damage == "a missing folder" else "the one before it"
    assert warning.endswith(f"; the run resumes from iteration 4, {which}")
    assert "hint" not in warning
    ours, theirs = (Checkpoint.open(folder) for folder in (run, trained_run))
    assert ours.iteration == 6
    for file in theirs.files:
        assert (ours.folder / file).read_bytes() == (theirs.folder / file).read_bytes(), file


def test_two_damaged_ones_are_passed_by(corpus: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    _flip(run / "iter_0000006" / PIECE)
    replace_manifest(run / "iter_0000004", "[]")
    assert "from iteration 2" in _gpt(corpus, "--train-iters", 6, "--load", run)
    of_4, of_6 = caplog.messages
    assert "iter_0000004/manifest.json: content: found list, wanted a JSON object" in of_4
    assert f"iter_0000006/{PIECE}: optim.exp_avg" in of_6
    for message in caplog.messages:
        assert message.endswith("; the run resumes from iteration 2, the one before it")


@pytest.mark.parametrize("damage", ["a flipped bit", "a truncated piece", "a loss scale of 0"])
def test_without_one_before_and_where_it_was_asked_for_the_damage_is_a_line(
    corpus: Path, run: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm, message = DAMAGES[damage]
    for iteration in (2, 4, 6):
        harm(run / f"iter_000000{iteration}")
    for load in (run, run / "iter_0000006"):
        line = _gpt(corpus, "--train-iters", 6, "--load", load, code=2)
        assert line.startswith("error: ")
        assert line.count("\n") == 1
        assert message in line
        assert "iter_0000006" in line, "the newest"


def test_checkpoints_after_the_newest_are_not_resumed_from(corpus: Path, run: Path) -> None:
    (run / LATEST).write_text("4\n")
    _flip(run / "iter_0000004" / PIECE)
    assert "from iteration 2" in _gpt(corpus, "--train-iters", 6, "--load", run)


def test_damage_to_what_is_not_taken_up_is_no_matter(
    corpus: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _flip(run / "iter_0000006" / PIECE)
    _gpt(corpus, "--train-iters", 1, "--load", run, "--finetune")
    assert caplog.messages == []


def test_another_format_is_no_damage(corpus: Path, run: Path) -> None:
    _edit(run / "iter_0000006" / MANIFEST, format=3)
    assert "format: found 3, wanted 1 or 2" in _gpt(corpus, "--train-iters", 6, "--load", run, code=2)


class Ranks:
    """Meshes of two ranks that are threads."""

    def __init__(self) -> None:
        self.numbers, self.met = [0, 0], threading.Barrier(2, timeout=20)

    def mesh(self, rank: int) -> Any:
        def largest(number: int) -> int:
            self.numbers[rank] = number
            self.met.wait()
            most = max(self.numbers)
            self.met.wait()
            return most

        return SimpleNamespace(rank=rank, layout=Layout(dp=2), all_reduce_max=largest)


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_go_on_from_one_that_all_of_them_can_read(
    run: Path, damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if damaged:
        _flip(run / "iter_0000004" / PIECE)
    ranks, run_config = Ranks(), RunConfig(checkpoint=CheckpointConfig(load=run))

    def rank(number: int, newest: int) -> int:
        def older(before: int) -> Checkpoint:
            return Checkpoint(run / f"iter_000000{min(before - 1, newest) // 2 * 2}")

        return agree_on_checkpoint(older(9), ranks.mesh(number), run_config, older).iteration

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(rank, (0, 1), (6, 4)))  # the second cannot open the newest
    assert ends == ([2, 2] if damaged else [4, 4])
    assert caplog.messages[0] == f"{run}/iter_0000004: newer ones cannot be read by every rank"
    assert len(caplog.messages) == 1 + damaged


def test_a_checkpoint_of_the_format_before_is_resumed_from(corpus: Path, run: Path) -> None:
    for folder in run.glob("iter_*"):
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        del manifest["side_files"]
        (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 1}), "utf-8")
        (folder / DIGEST).unlink()
    assert Checkpoint.open(run).format == 1
    _change_digits(run / "iter_0000006" / TRAINER, "consumed_samples")  # it has no checksums
    assert "from iteration 6" in _gpt(corpus, "--train-iters", 6, "--load", run)
