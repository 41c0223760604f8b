"""Results come in the order of the items, from however many processes, and a death among them is told."""

from __future__ import annotations

import os

import pytest

from mega_data.workers import in_order
from mega_schema.errors import MegaError


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def die_at_three(number: int) -> int:
    if number == 3:
        os._exit(1)
    return number


@pytest.mark.parametrize(("workers", "items"), [(1, 5), (2, 0), (2, 1), (2, 7), (3, 7)])
def test_results_are_in_the_order_of_the_items(workers, items):
    assert [result for result, _ in in_order(square, range(items), workers)] == [n * n for n in range(items)]


def test_more_than_one_process_works_and_none_of_them_is_ours():
    pids = {pid for _, pid in in_order(square, range(8), 2)}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_items_are_taken_only_as_results_are():
    taken = []

    def items():
        for number in range(100):
            taken.append(number)
            yield number

    results = in_order(square, items(), 2)
    for count in range(1, 10):
        next(results)
        assert len(taken) <= count + 2
    results.close()
    assert len(taken) < 20


def test_a_process_that_dies_is_told_in_a_line():
    with pytest.raises(MegaError, match="--workers: a worker process died: found 2; hint: fewer workers"):
        list(in_order(die_at_three, range(8), 2))
