"""Asynchronous saves: written values, kept checkpoints, failed saves."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.async_writer import SharedBuffer, SubprocessWriter
from mega_schema.checkpoint.checkpoint_dir import iterations
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import MegaError
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.event_log import EventLog, read_events
from mega_train.telemetry.events import Event, Message
from mega_train.telemetry.observers import Observers


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


Start = Callable[..., Trainer]


@pytest.fixture
def start(resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path) -> Start:
    """A trainer of 10 steps that saves every 2 to `tmp_path / "run"`, or goes on from there."""

    def start_trainer(*, resume: bool = False, **values: Any) -> Trainer:
        save = {"checkpoint__save": str(tmp_path / "run"), "checkpoint__save_interval": 2}
        checkpoint = Checkpoint.open(tmp_path / "run") if resume else None
        return Trainer(resolve_config(**save | values), Mesh(), open_corpus, checkpoint=checkpoint)

    return start_trainer


def _run(trainer: Trainer) -> list[Event]:
    """The whole run, and what it told."""

    class Recorder:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def on_event(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None: ...

    recorder, save = Recorder(), trainer.config.run.checkpoint.save
    assert save is not None
    TrainLoop(trainer, Observers([recorder, EventLog(save)])).run()
    return recorder.events


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Iterations whose checkpoint finds the disk full."""
    iterations: set[int] = set()
    begun: list[int] = []

    class FileSizeLimitedWriter(SubprocessWriter):
        def __init__(self, memory: SharedBuffer) -> None:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if begun[-1] in iterations else soft, hard))
            try:
                super().__init__(memory)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    save = Trainer.save

    def save_and_note(trainer: Trainer) -> None:
        begun.append(trainer.state.iteration)
        save(trainer)

    monkeypatch.setattr(Trainer, "save", save_and_note)
    monkeypatch.setattr("mega_train.checkpointing.pending_save.SubprocessWriter", FileSizeLimitedWriter)
    return iterations


def test_the_saved_values_are_those_of_the_step_while_training_continues(
    start: Start, tmp_path: Path
) -> None:
    trainer = start()
    for _ in range(3):
        trainer.step(trainer.state.lr)
    main_params = [main.clone() for main in trainer.sharding.main_params]
    trainer.save()
    assert trainer.saver.is_saving
    assert trainer.saver.saved_at is None
    for _ in range(3):
        trainer.step(trainer.state.lr)
    trainer.saver.finish()
    assert trainer.saver.saved_at == 3
    resumed = start(resume=True)
    assert resumed.state.iteration == 3
    for ours, theirs in zip(resumed.sharding.main_params, main_params, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(trainer.sharding.main_params, main_params, strict=True):
        assert not torch.equal(ours, theirs), "the run went on meanwhile"


@pytest.mark.parametrize("dtype", ["train__bf16", "train__fp16"])
def test_a_save_in_place_writes_the_same_bytes(start: Start, tmp_path: Path, dtype: str) -> None:
    folders = []
    for background in (True, False):
        save = tmp_path / str(background)
        values = {"checkpoint__save": str(save), "checkpoint__async_save": background, dtype: True}
        trainer = start(train__train_iters=2, **values)
        _run(trainer)
        folders.append(save / "iter_0000002")
    ours, theirs = ({p.name: p.read_bytes() for p in f.glob("*.safetensors")} for f in folders)
    assert ours == theirs
    assert len(ours) == 4


@pytest.mark.parametrize(
    ("values", "remaining"),
    [
        ({}, [2, 4, 6, 8, 10]),
        ({"checkpoint__keep_last": 2}, [8, 10]),
        ({"checkpoint__keep_every": 4}, [4, 8, 10]),
        ({"checkpoint__keep_last": 3, "checkpoint__keep_every": 4}, [4, 6, 8, 10]),
    ],
)
def test_old_checkpoints_go_as_new_ones_come(
    start: Start, tmp_path: Path, values: dict[str, Any], remaining: list[int]
) -> None:
    _run(start(**values))
    assert iterations(tmp_path / "run") == remaining
    assert not list((tmp_path / "run").glob(".*"))


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on(
    start: Start, tmp_path: Path, full_at: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    full_at.update((2, 6))
    events = _run(start())
    run = tmp_path / "run"
    assert iterations(run) == [4, 8, 10]
    assert not list(run.glob(".*")), "what was written of the others is gone"
    why = "File too large; training continues"
    assert caplog.messages == [
        f"{run}: no checkpoint of iteration 2: {why}; no checkpoint yet",
        f"{run}: no checkpoint of iteration 6: {why}; newest checkpoint: iteration 4",
    ]
    saves = [event for event in read_events(run) if event["event"] == "checkpoint"]
    assert [(save["iteration"], save["error"]) for save in saves] == [
        (iteration, "File too large" if iteration in full_at else "") for iteration in (2, 4, 6, 8, 10)
    ]
    for save in saves:
        assert set(save) == {
            *("event", "iteration", "blocked_seconds", "wait_seconds", "write_seconds", "error")
        }
        assert 0 <= save["wait_seconds"] <= save["blocked_seconds"] <= save["write_seconds"]
    assert not [event for event in events if isinstance(event, Message)], "nothing more to say"
    undisturbed = start(checkpoint__save=str(tmp_path / "other"))
    _run(undisturbed)
    resumed = start(resume=True)
    for ours, theirs in zip(resumed.sharding.main_params, undisturbed.sharding.main_params, strict=True):
        assert torch.equal(ours, theirs)


def test_a_last_checkpoint_that_failed_is_tried_again_and_then_ends_the_run_with_a_line(
    start: Start, tmp_path: Path, full_at: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    full_at.add(10)
    with pytest.raises(MegaError) as caught:
        _run(start())
    run = tmp_path / "run"
    assert str(caught.value) == (
        f"{run}: no checkpoint of iteration 10, the last: found File too large; "
        f"hint: free disk space; resume with --load {run} (iteration 8)"
    )
    assert len(caplog.messages) == 2
    assert Checkpoint.open(run).iteration == 8
    full_at.clear()
    _run(start(resume=True))
    assert Checkpoint.open(run).iteration == 10


def test_a_folder_that_cannot_be_written_to_is_no_end_either(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "run")

    with monkeypatch.context() as patch:
        patch.setattr("mega_schema.checkpoint.checkpoint_dir.begin", refuse)
        trainer.save()
        trainer.saver.finish()
        patch.undo()
        patch.setattr("subprocess.Popen", refuse)
        trainer.save()
        trainer.saver.finish()
    assert [saved.error for saved in trainer.saver.finished] == ["Permission denied"] * 2
    assert len(caplog.messages) == 2
    trainer.save()
    trainer.saver.finish()
    assert trainer.saver.last_error == ""
    assert iterations(tmp_path / "run") == [0]


def test_a_save_waits_for_the_one_before_and_says_so(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SubprocessWriter.state
    until = [0.0]

    def slow(writing: SubprocessWriter) -> int | None:
        state_code = state(writing)
        return state_code if time.monotonic() > until[0] else None

    monkeypatch.setattr(SubprocessWriter, "state", slow)
    trainer = start(checkpoint__save_interval=4, train__train_iters=8)
    save = Trainer.save

    def slow_at_first(self: Trainer) -> None:
        if self.state.iteration == 8:
            until[0] = time.monotonic() + 1.5
        save(self)
        if self.state.iteration == 4:  # however long the next iterations take on a busy machine
            until[0] = math.inf

    monkeypatch.setattr(Trainer, "save", slow_at_first)
    messages = [event.text for event in _run(trainer) if isinstance(event, Message)]
    assert len(messages) == 1
    assert messages[0].startswith("checkpoint 8 waited ")
    assert messages[0].endswith(" s for the previous checkpoint to finish")
    assert iterations(tmp_path / "run") == [4, 8]


def test_a_run_that_stops_at_a_number_that_is_none_keeps_the_save_that_was_under_way(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(checkpoint__save_interval=1)
    step = trainer.step

    def poisoned_step(rate: float) -> tuple[float, float]:
        if trainer.state.iteration == 3:
            assert trainer.saver.is_saving
            with torch.no_grad():
                trainer.params[0][1].fill_(torch.nan)
        return step(rate)

    trainer.step = poisoned_step  # type: ignore[method-assign]
    with pytest.raises(MegaError, match="iteration 4: loss or gradient is not finite"):
        _run(trainer)
    assert Checkpoint.open(tmp_path / "run").iteration == 3


@pytest.mark.parametrize("background", [True, False])
def test_writing_gives_signs_of_life(start: Start, background: bool) -> None:
    trainer = start(checkpoint__async_save=background)
    trainer.save()
    trainer.saver.finish()
    assert trainer.saver.heartbeat > 0
