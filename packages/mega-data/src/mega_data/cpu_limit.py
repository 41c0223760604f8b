"""Limit the CPU time of a block of code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class TimeLimitReached(BaseException):
    """The block has used its CPU time. Libraries handle exceptions of other classes themselves."""


@contextmanager
def limit_cpu_seconds(seconds: float) -> Iterator[None]:
    """Raise TimeLimitReached in the block after CPU seconds of the process; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise TimeLimitReached

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
