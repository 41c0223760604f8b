"""Handle SIGTERM and SIGUSR1 from a scheduler, a preemption or a user."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

# Slurm sends USR1 before the time limit (--signal=USR1@120)
EXIT_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})


class SignalHandler:
    """Records SIGTERM and SIGUSR1: `with SignalHandler() as handler: ... handler.received_signal()`.

    The signals do not end the process inside the block, however often they arrive.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None

    def received_signal(self) -> signal.Signals | None:
        """Return the first of the signals that arrived; None before."""
        return self._received

    def __enter__(self) -> Self:
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous_handlers.items():
            signal.signal(number, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)
