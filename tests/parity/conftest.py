"""Fixtures of the tests that run cases on several ranks."""

from __future__ import annotations

import pytest

from tests.parity.ranks import Outcomes
from tests.selection import requested_values


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How the cases went that the module names in CASES, by number of ranks."""
    return Outcomes(request.module.CASES, tmp_path_factory, requested_values(request, "case"))
