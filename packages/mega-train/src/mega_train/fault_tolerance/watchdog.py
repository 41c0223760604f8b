"""Turn a hang or a lost rank into one error line and the Python stacks of all ranks.

A collective that one rank never enters blocks all others silently. So every rank has a watchdog thread. When
the rank makes no progress for too long (`heartbeat_monitor`), when a collective fails because its peer is
gone, or when the process gets a signal and makes no progress, the thread calls the other ranks through the
store of the rendezvous (`peer_protocol`). Each writes its status there (`rank_status`). The first caller
waits a few seconds for them, reports in one line the missing ranks and the functions of the others, prints
the stacks (`hang_reporter`), and all ranks exit.

The main thread may be inside a call that never returns, so nothing here needs it: signals arrive through a
file descriptor, and the process ends with `os._exit`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from mega_schema.app.cli_runner import MISTAKE
from mega_schema.errors import MegaError
from mega_train.fault_tolerance.hang_reporter import HangReporter, diagnose
from mega_train.fault_tolerance.heartbeat_monitor import HeartbeatMonitor
from mega_train.fault_tolerance.peer_protocol import PeerProtocol
from mega_train.fault_tolerance.rank_status import collect_status
from mega_train.fault_tolerance.signal_handler import EXIT_SIGNALS

# exit codes: a rank hung or was lost; the process was terminated
EXIT_RANK_LOST = 3
EXIT_TERMINATED = 128 + signal.SIGTERM


class Watchdog:
    """Monitors a rank: `with Watchdog(...) as watchdog: ...`."""

    def __init__(
        self,
        monitor: HeartbeatMonitor,
        peers: PeerProtocol,
        reporter: HangReporter,
        *,
        tick: float = 0.5,
        exit: Callable[[int], None] = os._exit,
    ) -> None:
        """Build the watchdog of a rank; entering the context starts it.

        Args:
            tick: seconds between two checks.
            exit: ends the process.
        """
        self._monitor = monitor
        self._peers = peers
        self._reporter = reporter
        self._tick = tick
        self._exit = exit
        self._peer_error: Exception | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._peers.start()
        if not self._monitor.sigterm_grace:
            self._previous_handler = signal.signal(
                signal.SIGTERM, lambda *_: None
            )  # what counts is the byte in the pipe
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._peers.stop()
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        if not self._monitor.sigterm_grace:
            signal.signal(signal.SIGTERM, self._previous_handler)
        self._wake_writer.send(b"\0")
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def on_peer_lost(self, error: Exception) -> NoReturn:
        """Handle a failed collective: find and report the lost rank, then exit."""
        self._peer_error = error
        self._wake_writer.send(b"\0")
        while True:
            threading.Event().wait()

    def on_error(self, error: MegaError) -> NoReturn:
        """Handle an error with which the run cannot continue. The first rank with the error reports it.

        The others exit silently, including ranks that lose this rank because of it.
        """
        if self._peers.is_first_error():
            self._reporter.report_error(error)
        sys.exit(MISTAKE)

    def _watch(self) -> None:
        self._monitor.start()
        while True:
            readable, _, _ = select.select([self._wake_reader], [], [], self._tick)
            numbers = self._wake_reader.recv(64) if readable else b""
            for number in numbers:  # in the order of arrival: the first one is named
                if number in EXIT_SIGNALS:
                    self._monitor.record_signal(signal.Signals(number))
            if self._stopped.is_set():
                return
            self._monitor.update()
            reason, code = self._exit_reason()
            if reason:
                self._report_hang(reason, code)
                sys.stdout.flush()
                return self._exit(code)

    def _exit_reason(self) -> tuple[str, int]:
        """Return why this rank exits, and its exit code; an empty reason to continue."""
        idle = self._monitor.idle
        if self._monitor.is_terminated:
            delay = f", and made no progress for {idle:.0f} s" if self._monitor.sigterm_grace else ""
            return f"received {self._monitor.signal_name}{delay}", EXIT_TERMINATED
        if self._peer_error is not None:
            return f"lost another rank ({_gloo_cause(self._peer_error)})", EXIT_RANK_LOST
        if self._monitor.is_hung:
            return f"no progress for {idle:.0f} s", EXIT_RANK_LOST
        if self._peers.was_called.is_set():
            return "another rank called", EXIT_RANK_LOST
        return "", 0

    def _report_hang(self, reason: str, code: int) -> None:
        """Publish this rank's status; the first caller collects those of the others and reports."""
        own_status = collect_status(self._peers.rank, self._monitor.idle, self._peer_error)
        try:
            replies = self._peers.gather_statuses(own_status)
            if replies is None:
                return
            statuses, hosts = replies
            was_killed = code == EXIT_TERMINATED and not self._monitor.sigterm_grace
            if was_killed and len(statuses) == self._peers.world:
                self._reporter.report_lost_rank(reason)  # all ranks were terminated: nothing to diagnose
            else:
                self._reporter.report_lost_rank(reason, diagnose(statuses, hosts), statuses)
            self._peers.confirm_report()
        except (RuntimeError, TimeoutError) as error:
            description = f"{reason}, and the rendezvous store does not answer ({_gloo_cause(error)})"
            diagnosis = f"{own_status.name} in {own_status.frame} for {own_status.idle:.0f} s"
            self._reporter.report_lost_rank(description, diagnosis, [own_status])


def _gloo_cause(error: Exception) -> str:
    """Extract the cause of a failed collective from gloo's message."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
