"""Sample numbers of a rank equal Megatron's, each exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.errors import ConfigError
from mega_train.data.sampler import CyclicSampler, Sampler, SequentialSampler


def _cursor(kind: str, total: int, micro: int, dp: int, rank: int, sharded: bool = True) -> Sampler:
    if kind == "cyclic":
        return CyclicSampler(total, micro, dp, rank, is_sharded=sharded)
    return SequentialSampler(total, micro, dp, rank)


def test_the_ranks_read_megatrons_batches(oracle: Callable[[str], Any]) -> None:
    cases = oracle("samplers.json")
    assert [case["kind"] for case in cases] == ["single"] * 2 + ["cyclic"] * 4
    for case in cases:
        for rank, batches in enumerate(case["batches_per_rank"]):
            shape = case["total"], case["micro_batch"], case["dp"], rank
            read = _cursor(case["kind"], *shape, case.get("data_sharding", True))
            assert list(read.micro_batches(case["consumed"], len(batches))) == batches


def _step(kind: str, total: int, consumed: int, micro: int, dp: int, count: int, sharded: bool) -> list[int]:
    """Numbers that all ranks read in a step together."""
    cursors = [_cursor(kind, total, micro, dp, rank, sharded) for rank in range(dp)]
    return [n for cursor in cursors for batch in cursor.micro_batches(consumed, count) for n in batch]


@given(
    consumed=st.integers(0, 10_000),
    micro=st.integers(1, 5),
    dp=st.integers(1, 6),
    accumulation=st.integers(1, 5),
)
def test_a_step_reads_the_next_samples_once_whatever_the_layout(
    consumed: int, micro: int, dp: int, accumulation: int
) -> None:
    read = _step("single", 1 << 40, consumed, micro, dp, accumulation, sharded=False)
    assert sorted(read) == list(range(consumed, consumed + micro * dp * accumulation))


@given(total=st.integers(1, 30), consumed=st.integers(0, 100), micro=st.integers(1, 7))
def test_numbers_past_the_last_sample_begin_again(total: int, consumed: int, micro: int) -> None:
    (batch,) = SequentialSampler(total, micro, 1, 0).micro_batches(consumed, 1)
    assert batch == [(consumed + i) % total for i in range(micro)]
    assert all(0 <= number < total for number in batch)


@given(
    st.lists(st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1), (2, 3), (1, 4)]), max_size=6),
    st.sampled_from(["single", "cyclic"]),
    st.integers(1, 9),
)
def test_a_run_that_changes_its_layout_goes_on_with_the_same_samples(
    layouts: list[tuple[int, int]], kind: str, epochs_of_twelve: int
) -> None:
    """Steps of 12 samples, each on another micro-batch and dp; an epoch is a multiple of 12."""
    total = 12 * epochs_of_twelve
    for step, (micro, dp) in enumerate(layouts):
        numbers = _step(kind, total, 12 * step, micro, dp, 12 // (micro * dp), sharded=False)
        assert sorted(numbers) == sorted(_step(kind, total, 12 * step, 1, 1, 12, sharded=False))


@given(total=st.integers(4, 60), micro=st.integers(1, 4), dp=st.integers(1, 4), sharded=st.booleans())
def test_a_cyclic_epoch_reads_no_sample_twice_and_the_next_has_another_order(
    total: int, micro: int, dp: int, sharded: bool
) -> None:
    if total < micro * dp:
        return
    steps = total // (micro * dp)
    first = _step("cyclic", total, 0, micro, dp, steps, sharded)
    assert len(set(first)) == len(first) == steps * micro * dp
    assert all(0 <= number < total for number in first)
    second = _step("cyclic", total, steps * micro * dp, micro, dp, steps, sharded)
    assert len(set(second)) == len(second)
    if steps * micro > 9:
        assert second != first


def test_a_cyclic_order_needs_a_micro_batch_for_every_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        CyclicSampler(7, 2, 4, 0, is_sharded=True)
    assert str(caught.value) == (
        "--dataloader-type: cyclic needs a micro-batch for every rank: found 7 samples, "
        "wanted 8, micro-batch size x data parallel, or more; hint: --dataloader-type single"
    )


def test_a_cyclic_order_does_not_go_on_within_a_micro_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        list(CyclicSampler(40, 4, 2, 0, is_sharded=True).micro_batches(12, 1))
    assert str(caught.value) == (
        "--dataloader-type: cyclic cannot resume in the middle of a micro-batch: found 12 samples consumed, "
        "40 in an epoch, wanted a multiple of micro-batch size x data parallel = 8 in the epoch; "
        "hint: the layout that the run began with"
    )
