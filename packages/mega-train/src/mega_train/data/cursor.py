"""Which samples a rank reads next, by number: a function of how many the run has consumed, so that a run goes
on with the same samples on any layout. (Which tokens a number means is the index's matter.)
"""

from __future__ import annotations

from collections.abc import Iterator


def micro_batches(
    consumed: int, *, micro: int, dp: int, accumulation: int, rank: int, total: int
) -> Iterator[list[int]]:
    """Sample numbers of one optimizer step on one data-parallel rank, a list per micro-batch.

    Each micro-batch takes the next micro · dp samples, rank r the r-th `micro` of them (Megatron's "single"
    sampler). Numbers past `total` begin again at 0.
    """
    for step in range(accumulation):
        first = consumed + (step * dp + rank) * micro
        yield [(first + i) % total for i in range(micro)]
