"""Which sample numbers a rank reads: Megatron's, and none twice or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mega_train.data.cursor import micro_batches


def test_the_ranks_read_megatrons_batches(oracle: Callable[[str], Any]) -> None:
    cases = [case for case in oracle("samplers.json") if case["kind"] == "single"]
    assert cases
    for case in cases:
        for rank, batches in enumerate(case["batches_per_rank"]):
            found = micro_batches(
                case["consumed"],
                micro=case["micro_batch"],
                dp=case["dp"],
                accumulation=len(batches),
                rank=rank,
                total=case["total"],
            )
            assert list(found) == batches


@given(
    consumed=st.integers(0, 10_000),
    micro=st.integers(1, 5),
    dp=st.integers(1, 6),
    accumulation=st.integers(1, 5),
)
def test_a_step_reads_the_next_samples_once_whatever_the_layout(
    consumed: int, micro: int, dp: int, accumulation: int
) -> None:
    whole = micro * dp * accumulation
    read = [
        number
        for rank in range(dp)
        for batch in micro_batches(
            consumed, micro=micro, dp=dp, accumulation=accumulation, rank=rank, total=1 << 40
        )
        for number in batch
    ]
    assert sorted(read) == list(range(consumed, consumed + whole))


@given(total=st.integers(1, 30), consumed=st.integers(0, 100), micro=st.integers(1, 7))
def test_numbers_past_the_last_sample_begin_again(total: int, consumed: int, micro: int) -> None:
    (batch,) = micro_batches(consumed, micro=micro, dp=1, accumulation=1, rank=0, total=total)
    assert batch == [(consumed + i) % total for i in range(micro)]
    assert all(0 <= number < total for number in batch)
