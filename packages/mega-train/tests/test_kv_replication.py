"""Replicated key and value heads: whole tensors and ranges of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mega_model.distributed.mesh import Axis
from mega_schema.params import ONES, Param
from mega_schema.sharding import Split
from mega_train.distributed.kv_replication import all_reduce_replicated, owned_gradients

# eight query heads and two key and value heads of two rows each, over four ranks: rows 4 to 8 of each share
QKV = Param("qkv", (8 * 2 + 2 * 2 * 2, 3), 0, ONES, Split("tp", 0, (16, 4, 4), unit=2, repeats=(1, 2)))
CUT = Param("cut", (8, 3), 0, ONES, Split("tp", 0))
WHOLE = Param("whole", (4,), 0, ONES)
TIED = Param("tied", (8, 3), 0, ONES, Split("tp", 0), tied_to="cut")
SIZES = ((QKV, 24, 1.0), (CUT, 6, 2.0), (WHOLE, 4, 3.0), (TIED, 6, 4.0))  # of one rank's share


def _ranks(size: int) -> list[Any]:
    """Axes whose ranks are threads of this process."""
    meet, slots = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    class Threads:
        def __init__(self, rank: int) -> None:
            self.size, self.rank = size, rank

        def reduce(self, x: torch.Tensor) -> torch.Tensor:
            slots[self.rank] = x
            meet.wait()
            total = torch.stack(slots).sum(0)
            meet.wait()
            return x.copy_(total)

    return [Threads(rank) for rank in range(size)]


@pytest.mark.parametrize(("begin", "end"), [(0, 24), (0, 13), (13, 24), (14, 20), (2, 11), (0, 12), (24, 24)])
def test_neighbours_get_the_sum_of_their_parts_and_the_rest_stays(begin: int, end: int) -> None:
    gradients = [torch.randn(24, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    shards = [gradient[begin:end].clone() for gradient in gradients]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda g, tp: all_reduce_replicated([(QKV, begin, g)], tp), shards, _ranks(4)))
    for rank, shard in enumerate(shards):
        wanted = gradients[rank].clone()
        wanted[12:] = (gradients[rank] + gradients[rank ^ 1])[12:]
        assert torch.equal(shard, wanted[begin:end])


def test_every_element_is_answered_for_once() -> None:
    full = [(row, 0, torch.full((size,), value)) for row, size, value in SIZES]
    owned = [owned_gradients(full, Axis("tp", 4, rank)) for rank in range(4)]
    counts = torch.cat([part for parts in owned for part in parts]).unique(return_counts=True)
    assert dict(zip(*(t.tolist() for t in counts), strict=True)) == {1.0: 24 * 3, 2.0: 8 * 3, 3.0: 4}


@pytest.mark.parametrize("cut", [1, 11, 12, 13, 23])
def test_two_stretches_of_a_tensor_are_answered_for_as_the_whole_is(cut: int) -> None:
    gradient = torch.arange(24.0)
    for rank in range(4):
        tp = Axis("tp", 4, rank)
        whole = torch.cat(owned_gradients([(QKV, 0, gradient)], tp))
        parts = owned_gradients([(QKV, 0, gradient[:cut]), (QKV, cut, gradient[cut:])], tp)
        assert torch.equal(torch.cat(parts), whole)
