"""Write orders, carried out by a subprocess and in this process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_schema.checkpoint.async_writer import (
    InProcessWriter,
    SharedBuffer,
    SubprocessWriter,
    WriterHandle,
    describe_failure,
)
from mega_schema.checkpoint.checkpoint_dir import begin, iterations, partial_folder
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter, manifest_header, text_files
from mega_schema.checkpoint.writer_process import COMMIT, DISCARD
from mega_schema.parallel_layout import WHOLE
from mega_schema.sharding import Slab
from mega_schema.spec import gpt

SPEC = gpt(layers=1, hidden=4, heads=2, vocab=6, max_seq_len=4)
ALL = Slab((0, 0), (6, 4), (0, 0))
BOXES = [BoxToWrite(name, (6, 4), ALL, dtype) for name, dtype in (("a", "F32"), ("b", "BF16"), ("c", "F32"))]
VALUES = [np.arange(box.bytes, dtype=np.uint8) + number for number, box in enumerate(BOXES)]


def _order(run: Path, *, iteration: int = 3, rank: int = 0, last: int = 0) -> dict[str, Any]:
    begin(run, iteration)
    return {
        "run": str(run),
        "iteration": iteration,
        "rank": rank,
        "spaces": {MODEL: [box.to_record() for box in BOXES]},
        "commit": {
            "header": manifest_header(SPEC, WHOLE),
            "text_files": text_files({"iteration": iteration}, "a = 1\n"),
            "tokenizer": None,
            "keep_last": last,
            "keep_every": None,
            "replace": False,
            "superseded": [],
        },
    }


def _background(
    order: dict[str, Any], memory: SharedBuffer | None = None, most: int | None = None
) -> SubprocessWriter:
    """Start a writer; `most` limits the bytes of a file."""
    memory = memory or SharedBuffer()
    placed, past = memory.plan(order["spaces"][MODEL])
    room = memory.stage(order | {"spaces": {MODEL: placed}}, past)
    for box, values in zip(placed, VALUES, strict=True):
        room[box["buffer_offset"] : box["buffer_offset"] + box["bytes"]] = values.tobytes()
    with _files_of_at_most(most):
        return SubprocessWriter(memory)


def _in_place(order: dict[str, Any]) -> InProcessWriter:
    return InProcessWriter(order, lambda space, number: VALUES[number].data)


def _wait_for_end(writing: WriterHandle, seconds: float = 20) -> int:
    end = time.monotonic() + seconds
    while (state := writing.state()) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return state


def _commit(writing: WriterHandle) -> None:
    assert _wait_for_end(writing) == 0
    writing.send(COMMIT)
    assert _wait_for_end(writing) == 0
    writing.close()


def test_what_is_written_in_the_background_in_place_and_at_once_is_the_same(tmp_path: Path) -> None:
    background = _background(_order(tmp_path / "background"))
    _commit(background)
    in_place = _in_place(_order(tmp_path / "in-place"))
    _commit(in_place)
    assert background.bytes == in_place.bytes == sum(box.bytes for box in BOXES)
    save = CheckpointWriter(tmp_path / "at-once", 3)
    save.begin()
    values = dict(zip(BOXES, VALUES, strict=True))
    dtypes = {"F32": np.float32, "BF16": np.uint16}
    save.write(MODEL, 0, BOXES, lambda box: values[box].view(dtypes[box.dtype]).reshape(box.slab.shape))
    save.commit(SPEC, layout=WHOLE, trainer={"iteration": 3}, run_config="a = 1\n")
    first, *others = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "iter_0000003").iterdir()}
        for name in ("at-once", "background", "in-place")
    )
    assert len(first) == 5
    assert others == [first, first]


def test_nothing_is_committed_before_it_is_told(tmp_path: Path) -> None:
    writing = _background(_order(tmp_path))
    assert _wait_for_end(writing) == 0
    assert iterations(tmp_path) == []
    writing.close()
    assert iterations(tmp_path) == []


def test_memory_serves_one_order_after_another_and_grows(tmp_path: Path) -> None:
    memory = SharedBuffer()
    for iteration in (1, 2):
        _commit(_background(_order(tmp_path, iteration=iteration), memory))
    assert memory.map is not None
    before = len(memory.map)
    memory.stage({"run": "x" * 10_000}, before)
    assert len(memory.map) > 10_000
    assert iterations(tmp_path) == [1, 2]


def test_values_may_begin_anywhere_for_any_dtype() -> None:
    placed, past = SharedBuffer().plan([{"bytes": 3}, {"bytes": 64}, {"bytes": 65}], 128)
    assert [box["buffer_offset"] for box in placed] == [128, 192, 256]
    assert past == 384


@contextmanager
def _files_of_at_most(size: int | None) -> Iterator[None]:
    """Limit the file size, to simulate a full disk."""
    if size is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_takes_no_more_is_a_state_and_what_was_written_goes(
    tmp_path: Path, background: bool
) -> None:
    order = _order(tmp_path)
    writing: WriterHandle = _background(order, most=500) if background else _in_place(order)
    with _files_of_at_most(500):
        assert describe_failure(_wait_for_end(writing)) == "File too large"
    assert list(partial_folder(tmp_path, 3).iterdir())
    writing.send(DISCARD)
    assert _wait_for_end(writing) == 0
    writing.close()
    assert not partial_folder(tmp_path, 3).exists()


@pytest.mark.parametrize("background", [True, False])
def test_a_commit_that_finds_no_room_leaves_the_checkpoint_before_and_nothing_of_itself(
    tmp_path: Path, background: bool
) -> None:
    _commit(_in_place(_order(tmp_path, iteration=2)))
    order = _order(tmp_path)
    order["commit"]["text_files"]["trainer.json"] = "x" * 100_000
    writing: WriterHandle = _background(order, most=50_000) if background else _in_place(order)
    with _files_of_at_most(50_000):
        assert _wait_for_end(writing) == 0
        writing.send(COMMIT)
        assert describe_failure(_wait_for_end(writing)) == "File too large"
    writing.close()
    assert Checkpoint.open(tmp_path).iteration == 2
    assert not list(tmp_path.glob(".*"))


def test_an_earlier_checkpoint_that_cannot_be_removed_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(run: Path, newest: int, **_: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(run))

    monkeypatch.setattr("mega_schema.checkpoint.checkpoint_dir.prune", refuses)
    writing = _in_place(_order(tmp_path, last=1))
    _commit(writing)
    assert writing.note == f"{tmp_path}: Operation not permitted"
    assert iterations(tmp_path) == [3]


def test_a_writer_that_was_killed_is_a_state(tmp_path: Path) -> None:
    writing = _background(_order(tmp_path))
    os.kill(writing._process.pid, signal.SIGKILL)
    state = _wait_for_end(writing)
    if state == 0:  # it was faster
        writing.send(COMMIT)
        state = _wait_for_end(writing)
    assert describe_failure(state) == "the writer process was killed by SIGKILL"
    writing.send(DISCARD)
    assert _wait_for_end(writing) == state
    writing.close()


def test_what_a_terminal_and_a_scheduler_send_to_all_does_not_end_a_writer(tmp_path: Path) -> None:
    writing = _background(_order(tmp_path))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(writing._process.pid, number)
    _commit(writing)
    assert iterations(tmp_path) == [3]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "here they are heard"


def test_a_bug_in_a_writer_is_told_with_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = _order(tmp_path)
    del order["spaces"][MODEL][0]["name"]
    writing = _background(order)
    assert describe_failure(_wait_for_end(writing)) == "the writer process ended with an error"
    writing.close()
    assert "KeyError" in capfd.readouterr().err


ORPHAN = """
import os, pathlib, sys
from test_async_writer import _background, _order
writing = _background(_order(pathlib.Path(sys.argv[1])))
print(writing._process.pid, flush=True)
os._exit(0)
"""


def test_a_writer_whose_run_is_gone_commits_nothing_and_goes_too(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"},
        check=True,
    )
    pid, end = int(process.stdout), time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert iterations(tmp_path) == []


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
