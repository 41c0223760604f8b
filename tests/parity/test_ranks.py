"""A case that fails on one rank fails as a whole, and ends the waiting ranks and later cases."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mega_model.distributed.mesh import World
from tests.parity.ranks import Body, on_ranks


def _passes(world: World, meet: str, folder: Path) -> None:
    assert {1: "a", 0: "b"}[world.rank]


def _fails_on_one(world: World, meet: str, folder: Path) -> None:
    assert world.rank == 0, "a reason"
    time.sleep(600)


def _dies_on_one(world: World, meet: str, folder: Path) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _order_of_a_set(world: World, meet: str, folder: Path) -> None:
    (folder / str(world.rank)).write_text(" ".join({str(number) for number in range(50)}))


def test_a_rank_that_fails_ends_the_others_and_the_cases_after_it(tmp_path: Path) -> None:
    cases: dict[str, Body] = {"one": _passes, "two": _fails_on_one, "three": _passes}
    failures = on_ranks(2, cases, tmp_path)
    assert (failures["one"], failures["three"]) == ("", "not run: two failed")
    assert failures["two"].startswith("rank 1\n")
    assert "AssertionError: a reason" in failures["two"]


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    cases: dict[str, Body] = {"one": _dies_on_one, "two": _passes}
    assert on_ranks(2, cases, tmp_path) == {
        "one": "a rank ended without a word",
        "two": "not run: one failed",
    }


def test_ranks_disagree_on_the_order_of_a_set(tmp_path: Path) -> None:
    assert on_ranks(2, {"one": _order_of_a_set}, tmp_path) == {"one": ""}
    orders = [(tmp_path / "one" / str(rank)).read_text().split() for rank in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
