"""Being told to end: by a scheduler whose time is up, by whoever preempts the machine, by a person."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

# USR1 is what Slurm sends ahead of the end (--signal=USR1@120)
TO_LEAVE = frozenset({signal.SIGTERM, signal.SIGUSR1})


class Told:
    """Whether this process was told to end, as long as the block lasts: `with Told() as told: ... told()`.

    The signals themselves end nothing then, however often they come.
    """

    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> bool:
        return self._told

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in TO_LEAVE}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._told = True
