"""Compile a kernel for one thread and for several."""

# mypy: ignore-errors
# numba has no types

from __future__ import annotations

from types import FunctionType
from typing import Any

from numba import njit


def build_forms(kernel: FunctionType) -> tuple[Any, Any]:
    """Return the serial and the parallel form of a kernel.

    numba's cache on disk tells functions apart by their name and line, not by their options: two forms of one
    function would load each other's code, and a form for one thread would start threads. So the parallel one
    is a copy with a name of its own.
    """
    name = f"{kernel.__name__}_parallel"
    code = kernel.__code__.replace(co_name=name, co_qualname=name)
    copy = FunctionType(code, kernel.__globals__, name, kernel.__defaults__, kernel.__closure__)
    copy.__module__ = kernel.__module__
    return njit(nogil=True, cache=True)(kernel), njit(nogil=True, cache=True, parallel=True)(copy)
