"""Messages of the watchdog. tests/faults has whole runs that are killed and stopped."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from mega_model.distributed.mesh import Axis
from mega_schema.errors import MegaError
from mega_train.fault_tolerance.hang_reporter import HangReporter, diagnose, format_stacks
from mega_train.fault_tolerance.heartbeat_monitor import HeartbeatMonitor
from mega_train.fault_tolerance.peer_protocol import PeerProtocol
from mega_train.fault_tolerance.rank_status import RankStatus, current_frame
from mega_train.fault_tolerance.signal_handler import SignalHandler
from mega_train.fault_tolerance.watchdog import EXIT_RANK_LOST, EXIT_TERMINATED, Watchdog


class Rank:
    """A watchdog over this thread, as one rank of several in one process."""

    def __init__(self, store: HashStore, rank: int, world: int, limit: float = 60, hurry: float = 0) -> None:
        self.out, self.codes, self.beats = io.StringIO(), list[int](), 0
        self.left = threading.Event()
        self.peers = PeerProtocol(store, rank, world, reply_timeout=0.5, tick=0.02)
        self.watchdog = Watchdog(
            HeartbeatMonitor(lambda: self.beats, limit=limit, sigterm_grace=hurry),
            self.peers,
            HangReporter(
                rank, lambda: ("after iteration 7", "resume with --load RUN (iteration 5)"), self.out
            ),
            tick=0.02,
            exit=self._leave,
        )

    def _leave(self, code: int) -> None:
        self.codes.append(code)
        self.left.set()


def _output(rank: Rank) -> str:
    assert rank.left.wait(10)
    return rank.out.getvalue()


def _wait_over(axis: Axis, left: threading.Event) -> None:
    """A function that looks like one of this project and waits over an axis."""
    assert axis.name
    assert left.wait(10)


_wait_over = type(_wait_over)(  # what `place` goes by is the module a function says it is of
    _wait_over.__code__, _wait_over.__globals__ | {"__name__": "mega_model.distributed.mesh"}
)


def test_a_hang_is_said_with_the_place_the_axis_and_who_does_not_answer() -> None:
    store = HashStore()
    store.set("watchdog/host 1", "node7")
    rank = Rank(store, 0, 2, limit=0.1)
    with rank.watchdog:
        _wait_over(Axis("dp"), rank.left)
    line, *rest = _output(rank).splitlines()
    assert line.startswith(
        "error: rank 0, after iteration 7: no progress for 0 s: found rank 1 (node7) does not"
    )
    assert "_wait_over over dp (mesh.py:" in line
    assert line.endswith("; hint: resume with --load RUN (iteration 5)")
    assert rest[0].startswith("--- stacks of rank 0")
    assert any("in _wait_over" in text for text in rest)
    assert rank.codes == [EXIT_RANK_LOST]


def test_progress_is_no_hang() -> None:
    rank = Rank(HashStore(), 0, 1, limit=0.3)
    with rank.watchdog:
        for _ in range(20):
            rank.beats += 1
            time.sleep(0.04)
    assert rank.codes == []
    assert rank.out.getvalue() == ""


def test_a_lost_peer_is_told_with_what_the_collective_said() -> None:
    store = HashStore()
    store.set("watchdog/host 0", "node1")
    rank = Rank(store, 1, 2)
    error = (
        "[/build/gloo/pair.cc:537] Read error [127.0.0.1]:23704: Connection reset by peer. This is typically"
    )

    def raise_peer_error() -> None:
        try:
            raise RuntimeError(error)
        except RuntimeError as found:
            rank.watchdog.on_peer_lost(found)

    with rank.watchdog:
        threading.Thread(target=raise_peer_error, daemon=True).start()
        output = _output(rank)
    assert "lost another rank (Read error [127.0.0.1]:23704: Connection reset by peer): found " in output
    assert "found rank 0 (node1) does not answer" in output
    assert rank.codes == [EXIT_RANK_LOST]


def test_a_process_that_is_told_to_end_says_where_it_stood_and_no_stacks() -> None:
    rank = Rank(HashStore(), 0, 1)
    with rank.watchdog:
        os.kill(os.getpid(), signal.SIGTERM)
        output = _output(rank)
    message = "rank 0, after iteration 7: received SIGTERM"
    assert output == f"error: {message}; hint: resume with --load RUN (iteration 5)\n"
    assert rank.codes == [EXIT_TERMINATED]


def test_a_terminated_rank_may_continue_while_it_makes_progress() -> None:
    store = HashStore()
    store.set("watchdog/host 1", "node7")
    rank = Rank(store, 0, 2, hurry=0.4)
    with SignalHandler() as handler, rank.watchdog:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(20):
            rank.beats += 1
            time.sleep(0.04)
        assert handler.received_signal()
        assert rank.codes == []
        output = _output(rank)
    assert "rank 0, after iteration 7: received SIGUSR1, and made no progress for 0 s: found " in output
    assert rank.codes == [EXIT_TERMINATED]


def test_without_the_meeting_place_a_rank_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(HashStore):
        def clone(self) -> HashStore:
            return self

    def hang(*_: object) -> int:
        time.sleep(60)
        return 1

    rank = Rank(Cut(), 0, 1, limit=0.1)
    monkeypatch.setattr(rank.peers, "_exchange_statuses", hang)
    with rank.watchdog:
        output = _output(rank)
    assert "and the rendezvous store does not answer (for 1 s)" in output
    assert rank.codes == [EXIT_RANK_LOST]


def test_only_the_first_failing_rank_reports_its_error() -> None:
    store = HashStore()
    first, second, loser = (Rank(store, rank, 3) for rank in range(3))
    with first.watchdog, second.watchdog, loser.watchdog:
        for rank in (first, second):
            with pytest.raises(SystemExit) as left:
                rank.watchdog.on_error(MegaError("corpus", "is damaged"))
            assert left.value.code == 2
        threading.Thread(target=_loses, args=(loser.watchdog,), daemon=True).start()
        assert loser.left.wait(10)
    assert [rank.out.getvalue() for rank in (first, second, loser)] == ["error: corpus: is damaged\n", "", ""]
    assert loser.codes == [EXIT_RANK_LOST]


def _loses(watchdog: Watchdog) -> None:
    try:
        raise RuntimeError("[gloo] Connection closed by peer")
    except RuntimeError as error:
        watchdog.on_peer_lost(error)


def test_the_signals_are_given_back() -> None:
    before: Callable[..., object] | int | None = signal.getsignal(signal.SIGTERM)
    rank = Rank(HashStore(), 0, 1)
    with rank.watchdog:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def _sign(rank: int, where: str, idle: float = 61.0) -> RankStatus:
    return RankStatus(rank, f"node{rank // 2}", where, idle, f"stack of {rank}\n")


def test_the_verdict_names_the_missing_then_the_fewest() -> None:
    hosts = {rank: f"node{rank // 2}" for rank in range(6)}
    signs = [_sign(0, "a"), _sign(1, "a"), _sign(2, "a"), _sign(4, "b", 3.2)]
    assert diagnose(signs, hosts) == (
        "rank 3 (node1) does not answer, rank 5 (node2) does not answer, "
        "rank 4 (node2) in b for 3 s, ranks 0-2 in a for 61 s"
    )
    assert diagnose([_sign(0, "a"), _sign(2, "a"), _sign(3, "a")], {}) == "ranks 0 and 2-3 in a for 61 s"


def test_every_rank_has_its_stack() -> None:
    assert format_stacks([_sign(0, "a"), _sign(2, "a")]) == (
        "--- stacks of rank 0 (node0)\nstack of 0\n--- stacks of rank 2 (node1)\nstack of 2\n"
    )


def test_a_stack_without_ours_is_code_of_others() -> None:
    assert current_frame(sys._getframe()) == "code outside mega"
