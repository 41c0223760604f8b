"""Results have the order of the items for any number of processes; a dead process is an error."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mega_data.process_pool import ITEMS_AHEAD, SHELF_BYTES, ProcessPool, map_in_order
from mega_schema.errors import MegaError


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def die_at_three(number: int) -> int:
    if number == 3:
        os._exit(1)
    return number


@pytest.mark.parametrize(("workers", "items"), [(1, 5), (2, 0), (2, 1), (2, 7), (3, 7)])
def test_results_are_in_the_order_of_the_items(workers, items):
    assert [result for result, _ in map_in_order(square, range(items), workers)] == [
        n * n for n in range(items)
    ]


def test_more_than_one_process_works_and_none_of_them_is_ours():
    pids = {pid for _, pid in map_in_order(square, range(8), 2)}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_items_are_taken_only_as_results_are():
    consumed = []

    def items():
        for number in range(100):
            consumed.append(number)
            yield number

    results = map_in_order(square, items(), 2)
    for count in range(1, 10):
        next(results)
        assert len(consumed) <= count + 2 * ITEMS_AHEAD
    results.close()
    assert len(consumed) < 20


def test_a_process_that_dies_is_told_in_a_line():
    with pytest.raises(MegaError, match="--workers: a worker process died: found one of 2, killed"):
        list(map_in_order(die_at_three, range(8), 2))


def arrays(item: tuple[int, bytes]) -> tuple[np.ndarray, list[np.ndarray], str]:
    number, _ = item
    return np.arange(number, dtype=np.uint16), [np.arange(number % 7)], "x" * (number % 5)


def test_arrays_come_whole_whether_they_fit_the_shared_memory_or_not_and_large_items_block_nobody():
    sizes = [
        0,
        1,
        5,
        1000,
        SHELF_BYTES,
        SHELF_BYTES // 2,
        3,
        SHELF_BYTES // 2 - 64,
        SHELF_BYTES // 2 + 1,
        7,
        *range(100, 110),
    ]
    items = [(size, bytes(3_000_000)) for size in sizes]
    for size, (ids, (more,), text) in zip(sizes, map_in_order(arrays, items, 2), strict=True):
        assert (ids.dtype, len(ids), text) == (np.uint16, size, "x" * (size % 5))
        assert (ids == np.arange(size, dtype=np.uint16)).all()
        assert more.tolist() == list(range(size % 7))


@dataclass
class Costly:
    """Leaves a line in a file each time it is made."""

    log_file: Path

    def __reduce__(self):
        return _make_costly, (self.log_file,)

    def __call__(self, number: int) -> int:
        return os.getpid()


def _make_costly(path: Path) -> Costly:
    with path.open("a") as file:
        file.write("made\n")
    return Costly(path)


def test_the_work_is_made_once_for_all_processes_and_these_end_with_it(tmp_path):
    pids = set(map_in_order(Costly(tmp_path / "made"), range(12), 3))
    assert (tmp_path / "made").read_text() == "made\n"
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class UnpicklableWork(Costly):
    def __reduce__(self):
        return _raise_error, (self.log_file,)


def _raise_error(path: Path) -> UnpicklableWork:
    raise RuntimeError("cannot be made")


def test_work_that_was_made_ready_is_not_made_again_and_work_that_cannot_be_made_is_no_matter(tmp_path):
    work = Costly(tmp_path / "made")
    with ProcessPool(2) as started:
        started.prepare(UnpicklableWork(tmp_path / "broken"))
        started.prepare(work)
        assert len(set(started.map_in_order(work, range(6)))) == 2
    assert (tmp_path / "made").read_text() == "made\n"


def remember(work: Costly) -> int:
    work.log_file = Path("another")
    return os.getpid()


def refuse(work: Costly) -> int:
    raise ValueError("not this work")


def die(work: Costly) -> int:
    os._exit(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_work_is_asked_where_it_is_ready_and_what_a_question_changes_there_is_lost(workers, tmp_path):
    work = Costly(tmp_path / "made")
    with ProcessPool(workers) as started:
        with pytest.raises(ValueError, match="not this work"):
            started.ask(work, refuse)
        asked = started.ask(work, remember)
        assert (asked == os.getpid()) == (workers == 1)
        pids = set(started.map_in_order(work, range(6)))
        assert (asked in pids) == (workers == 1)
    if workers > 1:
        assert (tmp_path / "made").read_text() == "made\n"


def test_what_work_that_cannot_be_made_is_asked_is_its_error(tmp_path):
    with ProcessPool(2) as started:
        with pytest.raises(RuntimeError, match="cannot be made"):
            started.ask(UnpicklableWork(tmp_path / "broken"), remember)
        assert started.ask(Costly(tmp_path / "made"), remember) != os.getpid()


def test_a_question_that_kills_its_process_is_a_one_line_error(tmp_path):
    with ProcessPool(2) as started, pytest.raises(MegaError, match="--workers: a worker process died"):
        started.ask(Costly(tmp_path / "made"), die)


def test_processes_end_with_the_last_result_and_a_module_that_is_not_installed_is_passed_over(tmp_path):
    with ProcessPool(2, ["no_such_library"]) as started:
        pids = set(started.map_in_order(Costly(tmp_path / "made"), range(6)))
        until = time.monotonic() + 20
        while any(map(_lives, pids)) and time.monotonic() < until:
            time.sleep(0.01)
        assert len(pids) == 2
        assert not any(map(_lives, pids))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_file_beside_the_input_is_not_imported_for_a_module(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert [result for result, _ in map_in_order(square, range(3), 2)] == [0, 1, 4]


def test_work_that_cannot_be_made_is_told_in_a_line(tmp_path):
    with pytest.raises(RuntimeError, match="cannot be made"):
        list(map_in_order(UnpicklableWork(tmp_path / "broken"), range(6), 2))


def fail_at_three(number):
    if number == 3:
        raise ValueError("three is no number")
    return number


def test_an_exception_in_a_worker_is_passed_on_and_is_no_lack_of_memory():
    with pytest.raises(ValueError, match="three is no number") as raised:
        list(map_in_order(fail_at_three, range(8), 2))
    assert "in fail_at_three" in raised.value.__notes__[0]
