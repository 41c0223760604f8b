"""How ranks make sure that those they meet are of their own start.

torchrun starts a run again with the store that the start before left its keys in. A rank that reads the
address of a dead one there waits for nobody, so nothing is read until all ranks have agreed on who is here.
"""

from __future__ import annotations

import time
from datetime import timedelta
from hashlib import blake2b
from secrets import token_hex

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from mega_schema.errors import LayoutError

_POLL_SECONDS = 0.02  # seconds between two looks of up to _CROWD ranks; of more, each looks less often
_FULL_RATE_RANKS = 32  # so that thousands ask the store no more at once than these do
_START_SKEW = timedelta(minutes=1)  # processes start at different times, whatever a collective may take later


def rendezvous(init_method: str, rank: int, size: int, timeout: timedelta) -> Store:
    """Meet the other ranks, and share a store with them that holds nothing yet.

    Args:
        meet: where the processes find each other, a torch.distributed init_method.

    Raises:
        LayoutError: not all ranks came in time.
    """
    store, _, _ = next(torch_rendezvous(init_method, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return agree_on_roster(store, rank, size, max(timeout, _START_SKEW))


def agree_on_roster(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """The part of a store that only the ranks of this start use.

    Every rank leaves a name it made up. The first keeps a roster of all names until every rank has found its
    own in it: then none of the names is one that a dead rank left.

    Raises:
        LayoutError: not all ranks came in time.
    """
    name, end = token_hex(8), time.monotonic() + timeout.total_seconds()
    poll_seconds = _POLL_SECONDS * max(1.0, size / _FULL_RATE_RANKS)
    store.set(f"name {rank}", name)
    while time.monotonic() < end:
        if rank == 0:
            _publish_roster(store, size)
        roster = _read(store, "roster").split()
        if len(roster) == size and roster[rank] == name:
            digest = _digest(roster)
            store.set(f"found {rank}", digest)
            if _read(store, "agreed") == digest:
                return PrefixStore(digest, store)
        time.sleep(poll_seconds)
    raise LayoutError(
        f"rank {rank}",
        "the ranks of this run did not all come",
        found=f"{len([r for r in range(size) if _read(store, f'name {r}')])} in {timeout}",
        wanted=f"{size} processes",
        hint="look at the log of the host that is missing; --distributed-timeout-minutes waits longer",
    )


def _publish_roster(store: Store, size: int) -> None:
    names = [_read(store, f"name {rank}") for rank in range(size)]
    if all(names):
        store.set("roster", " ".join(names))
        digest = _digest(names)
        if all(_read(store, f"found {rank}") == digest for rank in range(size)):
            store.set("agreed", digest)


def _digest(names: list[str]) -> str:
    return blake2b(" ".join(names).encode(), digest_size=8).hexdigest()


def _read(store: Store, key: str) -> str:
    """What is there, or nothing."""
    return store.get(key).decode() if store.check([key]) else ""
