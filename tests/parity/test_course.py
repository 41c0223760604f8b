"""The course of a run over several ranks: they leave together."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_model.mesh import World
from mega_train.leaving import SIGNAL, Leaving
from mega_train.loop import Loop
from mega_train.watch.observers import Observers
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import trainer


def _leaves_together(world: World, meet: str, folder: Path) -> None:
    """One rank is told to end, after its second step; all leave after that step."""
    run = trainer("gpt", world, meet, folder, parallel__tp=2, parallel__pp=2)
    last = world.rank == world.size - 1
    told = Leaving(run.plan, run.mesh, told=lambda: last and run.iteration >= 2)
    assert Loop(run, Observers(), leaving=told).run() is SIGNAL
    assert run.iteration == 2
    run.mesh.leave()


CASES: dict[int, dict[str, Body]] = {4: {"ranks leave together": _leaves_together}}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(CASES, tmp_path_factory)


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in CASES for case in CASES[ranks]])
def test_the_course_of_a_run_is_one_for_all_ranks(outcomes: Outcomes, ranks: int, case: str) -> None:
    assert not (text := outcomes.of(ranks, case)), text
