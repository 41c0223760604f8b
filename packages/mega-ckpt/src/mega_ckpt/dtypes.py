"""Floating-point numbers from one width to another, with bfloat16 as bits since numpy has no such type."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from mega_schema.checkpoint import DTYPES
from mega_schema.errors import FormatError

NAMES: Mapping[str, str] = MappingProxyType({"fp32": "F32", "bf16": "BF16", "fp16": "F16"})
FLOATS = ("F32", "BF16", "F16")


def cast(stored: np.ndarray, have: str, want: str, where: object) -> np.ndarray:
    """The same numbers in another dtype, rounded to nearest, ties to even.

    Args:
        stored: as it lies in a file of dtype `have`, bfloat16 as its bits.
        have, want: two of FLOATS; equal ones hand `stored` back untouched.
        where: names the tensor in the message.

    Raises:
        FormatError: a finite number would become infinite.
    """
    if have == want:
        return stored
    number = (stored.astype(np.uint32) << 16).view(np.float32) if have == "BF16" else stored
    number = number.astype(np.float32)
    if want == "BF16":
        out = _to_bfloat16(number)
        infinite = (out & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):  # looked for below, with the tensor's name
            out = number.astype(DTYPES[want])
        infinite = np.isinf(out)
    lost = infinite & np.isfinite(number)
    if lost.any():
        raise FormatError(
            where,
            f"too large for {want}",
            found=float(number[lost][0]),
            hint="--dtype bf16 or --dtype fp32" if want == "F16" else "--dtype fp32",
        )
    return out


def numbers(stored: np.ndarray, dtype: str) -> np.ndarray:
    """What is stored, as float64."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def _to_bfloat16(number: np.ndarray) -> np.ndarray:
    """The upper half of a float32, rounded; a NaN stays one whatever its lower half was."""
    bits = number.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(number), quiet, rounded).astype(np.uint16)
