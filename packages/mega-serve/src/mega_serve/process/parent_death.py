"""End a process when its parent ends, so that no engine holds memory or a GPU without a server."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however it ends and whatever runs here.

    Source: prctl(2), PR_SET_PDEATHSIG. Linux only.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(0)
