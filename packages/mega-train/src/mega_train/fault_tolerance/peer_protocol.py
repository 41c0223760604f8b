"""Call the other ranks through the store of the rendezvous, and exchange statuses with them.

Keys in the store, under the prefix `watchdog`:

| key | value | written by |
|---|---|---|
| host R | host name of rank R | rank R, when it starts |
| calls | number of ranks that called | a rank that hangs, lost a peer, was terminated or was called |
| status R | status of rank R, as JSON | rank R, after it called |
| reported | empty | the first rank that called, once it has reported |
| causes | number of ranks that have an error | a rank whose run cannot continue |
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from mega_train.fault_tolerance.rank_status import RankStatus

T = TypeVar("T")


class PeerProtocol:
    """One rank's end of the protocol.

    A call to an unreachable store may never return, so every call has a timeout.

    Attributes:
        was_called: set once any rank has called.
    """

    def __init__(
        self, store: Store, rank: int, world: int, *, reply_timeout: float = 5.0, tick: float = 0.5
    ) -> None:
        """Prepare the protocol of a rank; `start` starts it.

        Args:
            store: of the rendezvous; the protocol opens its own connections.
            reply_timeout: seconds that the other ranks have to reply.
            tick: seconds between two polls for a call.
        """
        # separate connections: a call to a store that is cut off may never return
        self._listener_store, self._store = (
            PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self.rank = rank
        self.world = world
        self.was_called = threading.Event()
        self._reply_timeout = reply_timeout
        self._tick = tick
        self._stopped = threading.Event()
        self._listener = threading.Thread(
            target=self._listen_for_calls, name="watchdog's listener", daemon=True
        )

    def start(self) -> None:
        """Publish this rank's host, and listen for calls."""
        self._store.set(f"host {self.rank}", socket.gethostname())
        self._listener.start()

    def stop(self) -> None:
        """Stop listening."""
        self._stopped.set()

    def is_first_error(self) -> bool:
        """Announce an error of this rank; return whether no other rank has announced one."""
        try:
            return self._call_store(self._reply_timeout, lambda: self._store.add("causes", 1)) == 1
        except (RuntimeError, TimeoutError):
            return True  # no other rank can have announced one

    def gather_statuses(self, own_status: RankStatus) -> tuple[list[RankStatus], dict[int, str]] | None:
        """Call the other ranks. The first to call waits for their statuses, the others for its report.

        Returns:
            on the first rank that calls the statuses of those that reply, and the hosts of all; None where
            nothing is left to report.

        Raises:
            RuntimeError, TimeoutError: the store does not answer.
        """
        return self._call_store(2 * self._reply_timeout, lambda: self._exchange_statuses(own_status))

    def confirm_report(self) -> None:
        """Tell the other ranks that the report is written.

        Raises:
            RuntimeError, TimeoutError: the store does not answer.
        """
        self._call_store(self._reply_timeout, lambda: self._store.set("reported", ""))

    def _exchange_statuses(self, own_status: RankStatus) -> tuple[list[RankStatus], dict[int, str]] | None:
        if self._store.check(["causes"]):
            return None  # the cause was already reported
        is_first = self._store.add("calls", 1) == 1
        self._store.set(f"status {self.rank}", json.dumps(asdict(own_status)))
        if not is_first:
            self._wait_until(lambda: self._store.check(["reported"]), 2 * self._reply_timeout)
            return None
        keys = [f"status {rank}" for rank in range(self.world)]
        self._wait_until(lambda: self._store.check(keys), self._reply_timeout)
        replies = [self._store.get(key) for key in keys if self._store.check([key])]
        hosts = {rank: self._store.get(f"host {rank}").decode() for rank in range(self.world)}
        return [RankStatus(**json.loads(reply)) for reply in replies], hosts

    def _listen_for_calls(self) -> None:
        try:
            while not self._stopped.wait(self._tick):
                if self._listener_store.check(["calls"]):
                    return self.was_called.set()
        except RuntimeError:
            return  # no rank can call any more; this rank's own state is still checked

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until `condition` holds, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._tick / 10)

    def _call_store(self, seconds: float, function: Callable[[], T]) -> T:
        """Call `function` in a thread, which is abandoned after `seconds`."""
        result_queue: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

        def run() -> None:
            try:
                result_queue.put(function())
            except RuntimeError as error:
                result_queue.put(error)

        threading.Thread(target=run, name="watchdog's call", daemon=True).start()
        try:
            result = result_queue.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"for {seconds:g} s") from None
        if isinstance(result, RuntimeError):
            raise result
        return result
