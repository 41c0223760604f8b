"""Detect that a rank makes no progress."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Hashable


class HeartbeatMonitor:
    """Measures for how long a rank has made no progress.

    Attributes:
        idle: seconds without progress at the last `update`.
        signal_name: name of the first signal received; empty before.
        sigterm_grace: seconds without progress that count as a hang after a signal; 0 ends the process at
            once. Otherwise a signal handler handles the signals.
    """

    def __init__(self, heartbeat: Callable[[], Hashable], *, limit: float, sigterm_grace: float = 0) -> None:
        """Monitor a heartbeat.

        Args:
            heartbeat: a value that changes whenever the rank makes progress.
            limit: seconds without progress that count as a hang.
        """
        self._heartbeat = heartbeat
        self._limit = limit
        self.sigterm_grace = sigterm_grace
        self.idle = 0.0
        self.signal_name = ""
        self._signal_time: float | None = None
        self._last_heartbeat: Hashable = None
        self._progress_time = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._last_heartbeat = self._heartbeat()
        self._progress_time = time.monotonic()

    def record_signal(self, received: signal.Signals) -> None:
        """Record that a signal arrived; only the first one counts."""
        if self._signal_time is None:
            self._signal_time = time.monotonic()
            self.signal_name = received.name

    def update(self) -> None:
        """Read the heartbeat."""
        heartbeat = self._heartbeat()
        if heartbeat != self._last_heartbeat:
            self._last_heartbeat = heartbeat
            self._progress_time = time.monotonic()
        self.idle = time.monotonic() - self._progress_time

    @property
    def is_hung(self) -> bool:
        return self.idle > self._limit

    @property
    def is_terminated(self) -> bool:
        """Whether a signal arrived, and no progress was made for `sigterm_grace` seconds since."""
        return (
            self._signal_time is not None
            and min(self.idle, time.monotonic() - self._signal_time) >= self.sigterm_grace
        )
