"""The batch-size ramp-up equals Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mega_train.schedules.batch_size import BatchSizeRampup


def test_the_size_changes_where_megatrons_does(oracle: Callable[[str], Any]) -> None:
    for case in oracle("rampup.json"):
        sizes = BatchSizeRampup(
            case["global_batch"], case["start"], case["increment"], case["rampup_samples"]
        )
        changes, consumed, last = [], 0, 0
        for iteration in range(4000):
            size = sizes.size_at(consumed)
            if size != last:
                changes.append([iteration, size, size // (case["micro"] * case["dp"]), consumed])
                last = size
            consumed += size
        assert changes == case["changes_iter_gbs_nmb_consumed"]
        assert consumed == sizes.samples_after(0, 4000) == case["consumed_after_4000"]


def test_samples_are_enough_for_as_many_steps_as_megatron_counts() -> None:
    ramp = BatchSizeRampup(64, 16, 16, 1000)
    # 39 steps reach 1024 samples on the ramp; then whole steps of 64
    assert ramp.steps(1024 + 3 * 64 + 63) == 42
    assert ramp.steps(1000) == 39
    assert ramp.steps(160) == 11, "one more than 160 samples are enough for: Megatron's count while it ramps"
    assert BatchSizeRampup(64).steps(64 * 7 + 63) == 7


def ramps() -> st.SearchStrategy[BatchSizeRampup]:
    def build(start: int, increment: int, count: int, ramp: int, multiple: int) -> BatchSizeRampup:
        start = max(start, multiple)
        return BatchSizeRampup(start + increment * count, start, increment, ramp, multiple)

    small = st.integers(1, 9)
    return st.builds(build, small, small, small, st.integers(1, 300), st.integers(1, 4))


@given(sizes=ramps(), consumed=st.integers(0, 200), steps=st.integers(0, 60))
def test_after_is_what_steps_one_by_one_add_up_to(sizes: BatchSizeRampup, consumed: int, steps: int) -> None:
    reached = consumed
    for _ in range(steps):
        reached += sizes.size_at(reached)
    assert sizes.samples_after(consumed, steps) == reached


@given(sizes=ramps(), consumed=st.integers(0, 500))
def test_a_size_is_one_of_those_announced_and_never_falls(sizes: BatchSizeRampup, consumed: int) -> None:
    rounded = [size // sizes.multiple * sizes.multiple for size in sizes.sizes]
    assert sizes.size_at(consumed) in rounded
    assert sizes.size_at(consumed) <= sizes.size_at(consumed + 1)
