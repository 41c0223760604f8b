"""Buckets cover all parameters without overlap, and replicas own equal shards."""

from __future__ import annotations

import random

import pytest

from mega_train.distributed.bucket_layout import ALIGNMENT, assign_buckets, owned_range, shard_range


@pytest.mark.parametrize("seed", range(20))
def test_every_element_has_one_place_and_one_owner(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        sizes = [rng.randint(1, 10 ** rng.randint(1, 4)) for _ in range(rng.randint(1, 30))]
        most, replicas = rng.randint(1, 20_000), rng.choice((1, 2, 3, 4, 7, 8))
        alone = set(rng.sample(range(len(sizes)), rng.randint(0, min(2, len(sizes)))))
        buckets = assign_buckets(sizes, max_elements=most, replicas=replicas, separate=alone)
        order = [number for bucket in buckets for number, _ in bucket.param_offsets]
        assert order == list(reversed(range(len(sizes)))), "as the backward pass goes"
        for bucket in buckets:
            assert bucket.length % (replicas * ALIGNMENT) == 0
            end = 0
            for number, begin in bucket.param_offsets:
                assert begin % ALIGNMENT == 0
                assert end <= begin < end + ALIGNMENT
                end = begin + sizes[number]
            assert end <= bucket.length < end + ALIGNMENT * (replicas + 1), "no more padding than is needed"
            assert len(bucket.param_offsets) == 1 or alone.isdisjoint(n for n, _ in bucket.param_offsets)
            assert len(bucket.param_offsets) == 1 or bucket.param_offsets[-1][1] < most, (
                "closed once it is full"
            )
            for number, begin in bucket.param_offsets:
                seen = 0
                for rank in range(replicas):
                    first, past = shard_range(bucket.length, rank, replicas)
                    own_range = owned_range(begin, sizes[number], first, past)
                    assert own_range[0] == seen or own_range[0] == own_range[1]
                    seen = max(seen, own_range[1])
                assert seen == sizes[number]


def test_a_bucket_is_closed_by_the_parameter_that_fills_it() -> None:
    buckets = assign_buckets([64, 64, 128, 64], max_elements=128, replicas=1)
    assert [[number for number, _ in bucket.param_offsets] for bucket in buckets] == [[3, 2], [1, 0]]


def test_a_shared_weight_is_cut_alike_whatever_lies_around_it() -> None:
    first = assign_buckets([1000, 10, 20], max_elements=10**6, replicas=4, separate={0})
    last = assign_buckets([30, 5, 1000], max_elements=10**6, replicas=4, separate={2})
    assert first[-1].length == last[0].length
    assert first[-1].param_offsets == ((0, 0),)
    assert last[0].param_offsets == ((2, 0),)
