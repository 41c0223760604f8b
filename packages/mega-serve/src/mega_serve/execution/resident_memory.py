"""Make the operating system provide the memory of an array before a step writes to it.

Zeros of numpy are not in memory until they are written. The KV cache is written all over its pages within the
first requests, and each fault stops a step: in a virtual machine, whose host provides the memory then, faults
took a third of the time of a prefill.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

import numpy as np

MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in for writing; their content stays
_CHUNK_BYTES = 4 << 20
_LOWEST_PRIORITY = 19


def populate_in_background(arrays: list[np.ndarray]) -> threading.Thread | None:
    """Start a thread that makes contiguous arrays resident; content is neither read nor changed.

    The thread has the lowest priority and does not hold the interpreter's lock while it waits for memory. It
    ends early where the system refuses, for example for lack of memory; writes then fault as before.

    Returns:
        The thread, or None where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    thread = threading.Thread(target=_populate, args=(arrays,), name="populate KV cache", daemon=True)
    thread.start()
    return thread


def _populate(arrays: list[np.ndarray]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for array in arrays:
        first = array.ctypes.data & -mmap.PAGESIZE
        end = array.ctypes.data + array.nbytes
        for start in range(first, end, _CHUNK_BYTES):
            if madvise(start, min(_CHUNK_BYTES, end - start), MADV_POPULATE_WRITE):
                return
