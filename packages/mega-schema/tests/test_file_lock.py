"""Locks among processes, and file systems that have none."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from mega_schema.dataset.atomic_dataset import StagedDataset, atomic_folder
from mega_schema.file_lock import lock_file


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unable)


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_only_shared_locks_are_held_at_the_same_time(
    first: bool, second: bool, is_refused: bool, tmp_path: Path
) -> None:
    first_descriptor, second_descriptor = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock_file(first_descriptor, tmp_path, shared=first)
    if is_refused:
        with pytest.raises(BlockingIOError):
            lock_file(second_descriptor, tmp_path, shared=second)
    else:
        assert lock_file(second_descriptor, tmp_path, shared=second)
    os.close(first_descriptor)
    assert lock_file(second_descriptor, tmp_path)
    os.close(second_descriptor)


def test_a_process_can_wait_for_the_lock(tmp_path: Path) -> None:
    first_descriptor, second_descriptor = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock_file(first_descriptor, tmp_path)
    waiting = threading.Thread(target=lock_file, args=(second_descriptor, tmp_path), kwargs={"wait": True})
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    os.close(first_descriptor)
    waiting.join(60)
    assert not waiting.is_alive()
    os.close(second_descriptor)


@pytest.mark.usefixtures("without_locks")
def test_a_file_system_without_locks_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mega.schema"):
        assert not lock_file(0, tmp_path)
    line = f"{tmp_path} cannot be locked (No locks available): a second writer would not be detected"
    assert caplog.messages == [line]


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_files_of_another_process_are_not_removed(tmp_path: Path) -> None:
    """It cannot be known whether that process is alive."""
    file, folder = tmp_path / "corpus.bin.1.tmp", tmp_path / ".page.1.mega-new"
    file.touch()
    folder.mkdir()
    dataset = StagedDataset(tmp_path / "corpus")
    dataset.open(".bin").write(b"1")
    dataset.publish()
    dataset.discard()
    with atomic_folder(tmp_path / "page", lambda path: False) as new:
        (new / "index.html").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".page.1.mega-new", "corpus.bin", "corpus.bin.1.tmp", "page")
    ]
