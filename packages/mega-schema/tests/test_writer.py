"""Atomic checkpoint writes. tests/conformance has kills."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from mega_schema.atomic_io import atomic_write
from mega_schema.checkpoint.checkpoint_dir import (
    LATEST,
    iterations,
    pending_tracker,
    prune,
    remove_superseded,
    supersede,
)
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import MegaError
from mega_schema.parallel_layout import WHOLE
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt

ALL = Slab((0, 0), (6, 4), (0, 0))
BOX = BoxToWrite("embed.weight", (6, 4), ALL, "F32")


@pytest.fixture
def spec() -> ModelSpec:
    return gpt(layers=1, hidden=4, heads=2, vocab=6, max_seq_len=4)


def _begin_save(run: Path, iteration: int, value: float = 1.0) -> CheckpointWriter:
    save = CheckpointWriter(run, iteration)
    save.begin()
    save.write(MODEL, 0, [BOX], lambda box: np.full(box.slab.shape, value, np.float32))
    return save


def test_nothing_is_seen_before_the_commit(tmp_path: Path, spec: ModelSpec) -> None:
    save = _begin_save(tmp_path, 3)
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
    folder = save.commit(spec, layout=WHOLE, trainer={"iteration": 3}, run_config="a = 1\n")
    assert folder == tmp_path / "iter_0000003"
    assert (tmp_path / LATEST).read_text("utf-8") == "3\n"
    assert (folder / "run.toml").read_text("utf-8") == "a = 1\n"
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json",
        "manifest.sha256",
        "model-00000.safetensors",
        "run.toml",
        "trainer.json",
    ]


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path: Path, spec: ModelSpec) -> None:
    _begin_save(tmp_path, 3)
    _begin_save(tmp_path, 4).commit(spec, layout=WHOLE, trainer={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004", LATEST]


def test_between_two_renames_the_replaced_one_is_the_latest(tmp_path: Path, spec: ModelSpec) -> None:
    folder = _begin_save(tmp_path, 3).commit(spec, layout=WHOLE, trainer={})
    replaced = tmp_path / ".iter_0000003.replaced"
    folder.rename(replaced)
    assert Checkpoint.open(tmp_path).folder == replaced
    CheckpointWriter(tmp_path, 4).begin()
    assert Checkpoint.open(tmp_path).folder == folder


def test_a_checkpoint_of_the_same_iteration_is_replaced(tmp_path: Path, spec: ModelSpec) -> None:
    for value in (1.0, 2.0):
        _begin_save(tmp_path, 3, value).commit(spec, layout=WHOLE, trainer={}, replace=value == 2.0)
    assert Checkpoint.open(tmp_path).read(MODEL, "embed.weight", ALL).max() == 2.0
    assert not list(tmp_path.glob(".*"))


def test_the_tokenizers_files_travel_with_it(tmp_path: Path, spec: ModelSpec) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "identity.json").write_text("{}", "utf-8")
    folder = _begin_save(tmp_path / "run", 1).commit(spec, layout=WHOLE, trainer={}, tokenizer=tmp_path / "t")
    assert (folder / "tokenizer" / "identity.json").read_text("utf-8") == "{}"


@pytest.mark.parametrize("value", [np.zeros((6, 3), np.float32), np.zeros((6, 4), np.float64)])
def test_values_that_are_not_what_was_announced_are_a_bug(tmp_path: Path, value: np.ndarray) -> None:
    save = CheckpointWriter(tmp_path, 1)
    save.begin()
    with pytest.raises(AssertionError, match="embed.weight"):
        save.write(MODEL, 0, [BOX], lambda _: value)


def test_a_tensor_of_which_a_part_was_not_written_is_not_committed(tmp_path: Path, spec: ModelSpec) -> None:
    save = CheckpointWriter(tmp_path, 1)
    save.begin()
    half = BoxToWrite("embed.weight", (6, 4), Slab((0, 0), (3, 4), (0, 0)), "F32")
    save.write(MODEL, 0, [half], lambda box: np.zeros(box.slab.shape, np.float32))
    with pytest.raises(AssertionError, match="12 elements written"):
        save.commit(spec, layout=WHOLE, trainer={})
    assert not (tmp_path / LATEST).exists()


def test_a_rank_with_nothing_to_write_writes_no_file(tmp_path: Path) -> None:
    save = CheckpointWriter(tmp_path, 1)
    save.begin()
    save.write(
        MODEL,
        1,
        [BoxToWrite("embed.weight", (6, 4), Slab((6, 0), (0, 4), (0, 0)), "F32")],
        lambda _: np.zeros(0),
    )
    assert list(save.folder.iterdir()) == []


def test_values_are_asked_for_one_at_a_time_and_in_order(tmp_path: Path) -> None:
    asked: list[str] = []
    boxes = [BoxToWrite(name, (6, 4), ALL, "F32") for name in "abc"]

    def values(box: BoxToWrite) -> np.ndarray:
        size = (save.folder / "model-00000.safetensors").stat().st_size
        asked.append(box.name)
        assert size < 96 * len(asked) + 1024
        return np.zeros(box.slab.shape, np.float32)

    save = CheckpointWriter(tmp_path, 1)
    save.begin()
    save.write(MODEL, 0, boxes, values)
    assert asked == ["a", "b", "c"]


def test_a_file_is_replaced_when_the_block_ends_well_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with atomic_write(path) as new:
        new.write_text("one", "utf-8")
        assert not path.exists()
    assert path.read_text("utf-8") == "one"
    with pytest.raises(KeyboardInterrupt):
        _interrupt_write(path)
    assert path.read_text("utf-8") == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def _save(run: Path, iteration: int, spec: ModelSpec) -> None:
    _begin_save(run, iteration).commit(spec, layout=WHOLE, trainer={}, run_config="a = 1\n")


@pytest.mark.parametrize("calls", range(8))
def test_a_disk_that_is_full_is_one_line_and_leaves_the_checkpoint_before(
    tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    _begin_save(tmp_path, 3).commit(spec, layout=WHOLE, trainer={"iteration": 3})
    left = iter(range(calls))

    def full(descriptor: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a name, as write() does

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(MegaError) as caught:
            _save(tmp_path, 4, spec)
    assert str(caught.value) == (
        f"{tmp_path / '.iter_0000004.partial'}: not written: found No space left on device; "
        "hint: free disk space, or write to another disk"
    )
    assert Checkpoint.open(tmp_path).iteration == 3
    _save(tmp_path, 4, spec)
    assert Checkpoint.open(tmp_path).iteration == 4


def _interrupt_write(path: Path) -> None:
    with atomic_write(path) as new:
        new.write_text("two", "utf-8")
        raise KeyboardInterrupt


def test_a_file_that_is_shorter_than_it_was_written_is_not_committed(tmp_path: Path, spec: ModelSpec) -> None:
    save = _begin_save(tmp_path, 3)
    os.truncate(save.folder / "model-00000.safetensors", 100)
    with pytest.raises(MegaError, match="model-00000.safetensors has 100 bytes where"):
        save.commit(spec, layout=WHOLE, trainer={})
    assert not (tmp_path / LATEST).exists()


@pytest.mark.parametrize(
    ("last", "every_nth", "remaining"),
    [(1, None, [7, 9]), (2, None, [6, 7, 9]), (9, None, [2, 3, 4, 6, 7, 9]), (1, 3, [3, 6, 7, 9])],
)
def test_older_checkpoints_go_but_for_those_to_keep(
    tmp_path: Path, spec: ModelSpec, last: int, every_nth: int | None, remaining: list[int]
) -> None:
    for iteration in (2, 3, 4, 6, 9, 7):  # 9 is of a run that was abandoned
        _save(tmp_path, iteration, spec)
    foreign = tmp_path / "iter_0000001" / "mp_rank_00"
    foreign.mkdir(parents=True)
    removed = prune(tmp_path, 7, last=last, every=every_nth)
    assert iterations(tmp_path) == remaining
    assert removed == [i for i in (2, 3, 4, 6) if i not in remaining]
    assert Checkpoint.open(tmp_path).iteration == 7
    assert foreign.is_dir(), "what is not ours stays"
    assert not list(tmp_path.glob(".*"))


def test_a_killed_removal_is_invisible_and_completed_by_the_next_save(
    tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2):
        _save(tmp_path, iteration, spec)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 2, last=1, every=None)
    assert iterations(tmp_path) == [2]
    assert len(list(tmp_path.glob(".iter_*.removed"))) == 1
    _begin_save(tmp_path, 3)
    assert not list(tmp_path.glob(".iter_*.removed"))


def test_a_checkpoint_is_replaced_only_where_that_is_asked_for(tmp_path: Path, spec: ModelSpec) -> None:
    _begin_save(tmp_path, 3, 1.0).commit(spec, layout=WHOLE, trainer={})
    with pytest.raises(FileExistsError, match="there is a checkpoint already"):
        _begin_save(tmp_path, 3, 2.0).commit(spec, layout=WHOLE, trainer={})
    assert Checkpoint.open(tmp_path).read(MODEL, "embed.weight", ALL).max() == 1.0


def test_the_tracker_of_a_commit_that_lacks_its_last_rename_counts(tmp_path: Path, spec: ModelSpec) -> None:
    for iteration in (3, 4):
        _save(tmp_path, iteration, spec)
    (tmp_path / LATEST).write_text("3\n", "utf-8")
    pending = pending_tracker(tmp_path)
    pending.write_text("4\n", "utf-8")
    assert Checkpoint.open(tmp_path).iteration == 4
    os.utime(pending, (1, 1))
    assert Checkpoint.open(tmp_path).iteration == 3, "the tracker was written later, by a person"
    pending.write_text("5\n", "utf-8")
    assert Checkpoint.open(tmp_path).iteration == 3, "there is no such checkpoint"
    pending.write_text("", "utf-8")
    assert Checkpoint.open(tmp_path).iteration == 3


def test_a_name_that_cannot_be_flushed_is_taken_back(
    tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begin_save(tmp_path, 3, 1.0).commit(spec, layout=WHOLE, trainer={})

    def full(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    monkeypatch.setattr("mega_schema.checkpoint.checkpoint_dir.sync_folder", full)
    for iteration in (3, 4):
        save = _begin_save(tmp_path, iteration, 2.0)
        with pytest.raises(OSError, match="Input/output error"):
            save.commit(spec, layout=WHOLE, trainer={}, replace=True)
        assert iterations(tmp_path) == [3]
        assert Checkpoint.open(tmp_path).read(MODEL, "embed.weight", ALL).max() == 1.0


def test_superseded_checkpoints_are_ignored_and_removed_as_the_run_passes_them(
    tmp_path: Path, spec: ModelSpec
) -> None:
    _save(tmp_path, 3, spec)
    for _ in range(2):  # the second time in place of the first
        for iteration in (6, 9):
            _save(tmp_path, iteration, spec)
        supersede(tmp_path, (6, 7, 9))
    assert iterations(tmp_path) == [3]
    remove_superseded(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.glob("*.superseded")) == [
        "iter_0000006.superseded",
        "iter_0000009.superseded",
    ]
    remove_superseded(tmp_path, 6)
    assert [path.name for path in tmp_path.glob("*.superseded")] == ["iter_0000009.superseded"]
