"""Rendezvous that ignores keys left in the store by a previous launch attempt.

torchrun restarts a run with the same store, which still holds the previous attempt's keys. A rank that read
the address of a dead rank there would wait forever, so nothing is read until all live ranks have agreed on a
roster.
"""

from __future__ import annotations

import time
from datetime import timedelta
from hashlib import blake2b
from secrets import token_hex

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from mega_schema.errors import LayoutError

_POLL_SECONDS = 0.02  # between polls, for up to _FULL_RATE_RANKS ranks; more ranks poll less often each
_FULL_RATE_RANKS = 32  # thousands of ranks together send as many requests as these
_START_SKEW = timedelta(minutes=1)  # processes start at different times, however short the timeout


def rendezvous(init_method: str, rank: int, size: int, timeout: timedelta) -> Store:
    """Join the other ranks and return an empty store that they share.

    Args:
        init_method: torch.distributed's init_method.

    Raises:
        LayoutError: not all ranks came in time.
    """
    store, _, _ = next(torch_rendezvous(init_method, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return agree_on_roster(store, rank, size, max(timeout, _START_SKEW))


def agree_on_roster(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the part of a store that only the ranks of this launch attempt use.

    Every rank writes a random name. Rank 0 keeps publishing a roster of all names until every rank has
    confirmed that its own name is in it: then no name is left over from a dead rank.

    Raises:
        LayoutError: not all ranks came in time.
    """
    name = token_hex(8)
    end = time.monotonic() + timeout.total_seconds()
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
        "not all ranks joined the rendezvous",
        found=f"{len([r for r in range(size) if _read(store, f'name {r}')])} in {timeout}",
        wanted=f"{size} processes",
        hint="read the log of the missing host, or raise the timeout",
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
    """Return the value of a key, or "" if it is not set."""
    return store.get(key).decode() if store.check([key]) else ""
