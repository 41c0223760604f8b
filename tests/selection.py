"""Divide the cases of a test between `make test` and `make test-long`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import pytest

long = pytest.mark.long


def every_nth(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters: the first of each `step` is for `make test`, the others are long."""
    return [_parameter(case, is_long=i % step > 0) for i, case in enumerate(cases)]


def one_of_each_kind(kind: Callable[[Any], Hashable], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters: one of each kind is for `make test`, the others are long.

    The one is the first of the first kind, the second of the second and so on: kinds whose cases count
    through the same values keep different ones.
    """
    cases = list(cases)
    groups: dict[Hashable, list[int]] = {}
    for i, case in enumerate(cases):
        groups.setdefault(kind(case), []).append(i)
    short = {members[turn % len(members)] for turn, members in enumerate(groups.values())}
    return [_parameter(case, is_long=i not in short) for i, case in enumerate(cases)]


def named_cases(names: Collection[str], cases: Mapping[int, Iterable[str]]) -> list[Any]:
    """Return (ranks, name) of each case as parameters: `names` are for `make test`, the others long."""
    return [_parameter((ranks, name), is_long=name not in names) for ranks in cases for name in cases[ranks]]


def without_digits(case: tuple[int, str]) -> tuple[int, str]:
    """Return the kind of a case (ranks, name) whose name tells its variants apart by digits."""
    return case[0], re.sub(r"\d+", "", case[1])


def requested_values(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Return the values of a parameter that the selected tests of the requesting module have."""
    specs = [
        item.callspec
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return {spec.params[parameter] for spec in specs if parameter in spec.params}


def _parameter(case: Any, *, is_long: bool) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=(long,) if is_long else ())
