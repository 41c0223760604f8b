"""Being told to end: by a scheduler whose time is up, by whoever preempts the machine, by a person."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

# USR1 is what Slurm sends ahead of the end (--signal=USR1@120)
EXIT_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})


class SignalHandler:
    """Whether this process was told to end, as long as the block lasts: `with Told() as told: ... told()`.

    The signals themselves end nothing then, however often they come.
    """

    def __init__(self) -> None:
        self._received = False

    def received(self) -> bool:
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
        self._received = True
