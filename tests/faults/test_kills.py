"""A repeatedly killed run ends like an undisturbed one (`tests.faults.kills`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import run_with_kills


@pytest.mark.parametrize(("ranks", "kills"), [pytest.param(1, 20, marks=pytest.mark.long), (2, 12)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    tmp_path: Path, ranks: int, kills: int
) -> None:
    report = run_with_kills(tmp_path, ranks, kills)
    assert report.wrong == [], "bit for bit"
    assert report.reached == sorted(report.reached), "nothing that was saved is lost"
    assert len(set(report.reached)) > kills / 3, "most of them in the middle of the run"
    assert report.left >= 2, "some in the middle of a checkpoint"
