"""Collect the status of a rank: its current function, idle time, and the Python stacks of its threads."""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from types import FrameType

from mega_model.distributed.mesh import Axis

_PACKAGES = ("mega_train", "mega_model", "mega_schema")
_WATCHDOG_THREADS = "watchdog"  # their names begin so; their stacks are left out


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status of a rank.

    Attributes:
        frame: the innermost function of this project on the stack, and the axis it communicates over.
        idle: seconds without progress.
        stacks: of its threads, as text.
    """

    rank: int
    host: str
    frame: str
    idle: float
    stacks: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


def collect_status(rank: int, idle: float, collective_error: Exception | None = None) -> RankStatus:
    """Collect the status of this process.

    Args:
        collective_error: the error of a collective that failed in the main thread, which now waits; the
            status then has the stack of the collective.
    """
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    if collective_error is not None:
        main = [frame for frame, _ in traceback.walk_tb(collective_error.__traceback__)][-1]
    texts = traceback.format_stack(main)
    for thread in threading.enumerate():
        if thread.ident in frames and not thread.name.startswith(_WATCHDOG_THREADS):
            texts += [f"  thread {thread.name}\n", *traceback.format_stack(frames[thread.ident])]
    return RankStatus(rank, socket.gethostname(), current_frame(main), idle, "".join(texts))


def current_frame(frame: FrameType | None) -> str:
    """Describe the innermost function of this project on a stack, and the axis it communicates over."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _PACKAGES:
            axes = [value.name for value in frame.f_locals.values() if isinstance(value, Axis)]
            axis_text = f" over {axes[0]}" if axes else ""
            return f"{frame.f_code.co_qualname}{axis_text} ({module.rpartition('.')[2]}.py:{frame.f_lineno})"
        frame = frame.f_back
    return "code outside mega"
