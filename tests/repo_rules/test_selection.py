"""Dividing cases between `make test` and `make test-long` loses none of them."""

from __future__ import annotations

import pytest

from tests.selection import every_nth, one_of_each_kind, without_digits

CASES = [(ranks, f"stage_{stage}_{kind}") for ranks in (2, 4) for kind in "ab" for stage in range(4)]


def _short(parameters: list[object]) -> list[object]:
    return [parameter.values for parameter in parameters if not parameter.marks]  # type: ignore[attr-defined]


def test_every_case_is_a_parameter_and_one_of_each_three_is_short() -> None:
    parameters = every_nth(3, CASES)
    assert [parameter.values for parameter in parameters] == CASES
    assert _short(parameters) == CASES[::3]


def test_one_of_each_kind_is_short_and_kinds_keep_different_ones() -> None:
    parameters = one_of_each_kind(without_digits, CASES)
    assert [parameter.values for parameter in parameters] == CASES
    assert _short(parameters) == [(2, "stage_0_a"), (2, "stage_1_b"), (4, "stage_2_a"), (4, "stage_3_b")]


def test_the_default_run_leaves_out_the_long_tests_alone(pytestconfig: pytest.Config) -> None:
    options = pytestconfig.getini("addopts")
    assert options[-2:] == ["-m", "not long"]
    assert any(marker.startswith("long:") for marker in pytestconfig.getini("markers"))
