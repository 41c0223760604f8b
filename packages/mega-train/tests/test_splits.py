"""Boundaries of training, validation and test equal Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.errors import ConfigError
from mega_train.config.data import SplitRule
from mega_train.data.splits import split_ranges


def test_mcore_boundaries_are_megatrons(oracle: Callable[[str], Any]) -> None:
    compared = 0
    for split, case in oracle("splits_mcore.json").items():
        for count, ranges in case["ranges"].items():
            actual_ranges = split_ranges(split, int(count))
            for ours, theirs in zip(actual_ranges, ranges, strict=True):
                assert ours[0] == ours[1] if theirs is None else list(ours) == theirs, (split, count)
                compared += 1
    assert compared > 100


def test_legacy_boundaries_are_megatrons(oracle: Callable[[str], Any]) -> None:
    compared = 0
    for split, case in oracle("splits_legacy.json").items():
        for count, bounds in case.items():
            (a, b), (c, d), (e, f) = split_ranges(split, int(count), "legacy")
            assert [a, b, d, f] == bounds, (split, count)
            assert (b, d) == (c, e)
            compared += 1
    assert compared > 50


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    st.integers(0, 100_000),
    st.sampled_from(["mcore", "legacy"]),
)
def test_the_three_ranges_are_in_order_and_end_with_the_corpus(
    parts: list[int], sequences: int, rule: SplitRule
) -> None:
    first, second, third = split_ranges(",".join(map(str, parts)), sequences, rule)
    assert 0 == first[0] <= first[1] <= second[1] <= third[1]
    assert (first[1], second[1]) == (second[0], third[0])
    assert third[1] == sequences


@pytest.mark.parametrize(
    "split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "1.2.3", ".", "nan", "inf,1", "1e999"]
)
def test_a_split_that_is_no_shares_is_refused(split: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_ranges(split, 10)
    assert str(caught.value) == f"--split: is not three shares: found {split!r}, wanted such as 969,30,1"


@pytest.mark.parametrize("split", ["969, 30, 1", "969/30/1", "969;30;1", "0.969 0.03 0.001"])
def test_shares_are_apart_however_they_are_separated(split: str) -> None:
    assert split_ranges(split, 1000) == ((0, 969), (969, 999), (999, 1000))
