"""Following a run: newer checkpoints, damaged and half-copied ones, other models, folders that vanish."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mega_schema.checkpoint.checksums import verify_namespace
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_serve.execution.checkpoint_follower import CheckpointFollower
from tests.serving.random_checkpoint import open_byte_tokenizer, save_random_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"


class Run:
    """A run that is followed, and the iterations that were loaded."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.loads: list[int] = []
        self.follower = CheckpointFollower(folder, Checkpoint.open(folder), self._load)

    def save(self, iteration: int, *, spec: ModelSpec | None = None, tokenizer: Path | None = None) -> Path:
        words = tokenizer or self.folder / "words"
        save_random_checkpoint(self.folder, spec or self.spec, words, iteration=iteration)
        return self.folder / f"iter_{iteration:07d}"

    def poll(self) -> int | None:
        self.follower.poll()
        return self.follower.take()

    def _load(self, checkpoint: Checkpoint) -> int:
        self.loads.append(checkpoint.iteration)
        verify_namespace(checkpoint, MODEL)
        return checkpoint.iteration


@pytest.fixture
def run(checkpoint: Path, spec: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Run:
    folder = tmp_path / "run"
    shutil.copytree(checkpoint, folder)
    caplog.set_level(logging.WARNING, "mega.serve.engine")
    return Run(folder, spec)


def test_a_newer_checkpoint_is_loaded_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert run.poll() is None
    run.save(9)
    assert [run.poll(), run.poll()] == [9, None]
    run.save(12, spec=replace(run.spec, init_std=0.5))  # changes no result
    assert run.poll() == 12
    assert run.loads == [9, 12]
    assert caplog.messages == []


def test_damaged_weights_are_reported_and_read_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    folder = run.save(9)
    (weights,) = folder.glob("model-*")
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-100] + b"\x07" + sound[-99:])
    assert [run.poll() for _ in range(3)] == [None] * 3
    assert run.loads == [9]
    (message,) = caplog.messages
    assert message.startswith(f"iteration 7 is still served: {weights}: model ")
    assert "values are not those that were written" in message
    weights.write_bytes(sound)  # copied again
    assert run.poll() == 9
    assert len(caplog.messages) == 1


def test_a_checkpoint_that_is_being_copied_is_reported_once_and_loaded_when_it_is_whole(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run.save(9)
    (weights,) = folder.glob("model-*")
    sound = weights.read_bytes()
    for size in range(0, len(sound), len(sound) // 5):
        weights.write_bytes(sound[:size])
        assert run.poll() is None
    (message,) = caplog.messages
    assert "size in bytes: found 0, wanted" in message
    weights.write_bytes(sound)
    assert run.poll() == 9
    (run.folder / TRACKER).write_text("12")
    assert [run.poll() for _ in range(3)] == [None] * 3
    assert len(caplog.messages) == 2
    assert "is not a Mega checkpoint" in caplog.messages[1]


def save_with_other_layers(run: Run) -> None:
    run.save(9, spec=replace(run.spec, layers=3))


def save_with_other_context(run: Run) -> None:
    run.save(9, spec=replace(run.spec, max_seq_len=32))


def save_with_other_words(run: Run) -> None:
    """Save a tokenizer with as many ids, two of which are swapped."""
    folder = run.folder / "other"
    folder.mkdir()
    open_byte_tokenizer(folder)
    vocab_file = folder / "vocab.json"
    vocab = json.loads(vocab_file.read_text("utf-8"))
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    vocab_file.write_text(json.dumps(vocab), "utf-8")
    words = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=folder / "merges.txt")
    words.save(run.folder / "other-words")
    run.save(9, tokenizer=run.folder / "other-words")


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_with_other_layers, "is another model: layers: found 3, wanted 2; hint: "),
        (save_with_other_context, "is another model: max_seq_len: found 32, wanted 64; hint: "),
        (save_with_other_words, "has another tokenizer: found sha256 "),
    ],
)
def test_another_model_is_refused_in_one_line(
    run: Run, save: Callable[[Run], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(run)
    assert [run.poll() for _ in range(3)] == [None] * 3
    assert run.loads == []
    (line,) = caplog.messages
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "error", [FileNotFoundError("weights"), RuntimeError("CUDA out of memory\nTried"), MemoryError()]
)
def test_a_load_that_fails_does_not_end_the_thread(
    checkpoint: Path, spec: ModelSpec, tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checkpoint, folder)

    def load(newer: Checkpoint) -> int:
        if newer.iteration == 9:
            raise error
        return newer.iteration

    follower = CheckpointFollower(folder, Checkpoint.open(folder), load)
    save_random_checkpoint(folder, spec, folder / "words", iteration=9)
    follower.poll()
    follower.poll()
    (line,) = caplog.messages
    assert type(error).__name__ in line
    assert "\n" not in line
    save_random_checkpoint(folder, spec, folder / "words", iteration=12)
    follower.poll()
    assert follower.take() == 12
