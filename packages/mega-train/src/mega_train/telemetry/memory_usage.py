"""Memory use of a rank."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_stats(device: torch.device) -> dict[str, int]:
    """Return bytes by kind.

    On a GPU: the `reserved` and `allocated` bytes of torch's allocator, the `peak` of the latter, and the
    number of allocated blocks (`allocated_count`). Otherwise the process's `resident` bytes, if the system
    reports them, and their `peak`.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "reserved": stats["reserved_bytes.all.current"],
            "allocated": stats["allocated_bytes.all.current"],
            "peak": stats["allocated_bytes.all.peak"],
            "allocated_count": stats["allocation.all.current"],
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = {"peak": peak if sys.platform == "darwin" else peak * 1024}
    if _STATM.is_file():
        sizes["resident"] = int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return sizes


def used_bytes(stats: Mapping[str, int]) -> int:
    """Return the bytes that other processes cannot use: reserved on a GPU, else resident."""
    return stats.get("reserved", stats.get("resident", stats.get("peak", 0)))
