"""Every pair of parallel settings trains like one process: float32, 1e-5, ten steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mega_model.distributed.mesh import World
from tests.parity.matrix import MOST, Row, covering_rows, pairs, possible, ranks, sentence, settings
from tests.parity.ranks import Outcomes
from tests.parity.runs import same_as_one_process
from tests.selection import one_of_each_kind, requested_values

ROWS = {sentence(row): row for row in covering_rows()}


def _trains_alike(row: Row, world: World, meet: str, folder: Path) -> None:
    same_as_one_process(row["model"], world, meet, folder, count=10, **settings(row))


CASES = {
    size: {name: partial(_trains_alike, row) for name, row in ROWS.items() if ranks(row) == size}
    for size in sorted({ranks(row) for row in ROWS.values()})
}


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], str]:
    return Outcomes(CASES, tmp_path_factory, requested_values(request, "name")).outcome


@pytest.mark.parametrize("name", one_of_each_kind(lambda name: ranks(ROWS[name]), ROWS))
def test_it_trains_as_one_process_does(outcome: Callable[[int, str], str], name: str) -> None:
    assert outcome(ranks(ROWS[name]), name) == ""


def test_every_two_settings_that_can_stand_together_do() -> None:
    wanted = set().union(*(pairs(row) for row in possible()))
    assert wanted == set().union(*(pairs(row) for row in ROWS.values()))
    assert max(ranks(row) for row in ROWS.values()) == MOST
