"""Ranks rendezvous with those of the same launch attempt, whatever keys an earlier one left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from mega_model.distributed.rendezvous import agree_on_roster
from mega_schema.errors import LayoutError


def _meet(store: Store, size: int, late: int | None = None) -> list[Store]:
    stores: dict[int, Store] = {}

    def come(rank: int) -> None:
        if rank == late:
            time.sleep(0.2)
        stores[rank] = agree_on_roster(store, rank, size, timedelta(seconds=30))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [stores[rank] for rank in range(size)]


def test_all_ranks_share_what_one_of_them_writes() -> None:
    stores = _meet(HashStore(), 3)
    stores[2].set("address", "here")
    assert [store.get("address") for store in stores] == [b"here"] * 3


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_an_earlier_start_left_is_not_seen(late: int) -> None:
    common = HashStore()
    for store in _meet(common, 3):
        store.set("address", "of a dead rank")
    assert not any(store.check(["address"]) for store in _meet(common, 3, late))


def test_a_start_with_fewer_ranks_is_a_start_of_its_own() -> None:
    common = HashStore()
    _meet(common, 3)[0].set("address", "of a dead rank")
    fewer = _meet(common, 2, late=0)
    assert not any(store.check(["address"]) for store in fewer)
    fewer[1].set("address", "here")
    assert fewer[0].get("address") == b"here"


def test_ranks_that_do_not_come_are_counted() -> None:
    with pytest.raises(LayoutError, match=r"^rank 0: not all ranks joined the rendezvous: found 1 in"):
        agree_on_roster(HashStore(), 0, 2, timedelta(seconds=0.1))
