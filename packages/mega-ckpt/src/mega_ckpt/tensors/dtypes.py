"""Cast floating-point numbers; bfloat16 is stored as uint16 bits, since numpy has no such type."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from mega_schema.checkpoint.reader import DTYPES
from mega_schema.errors import FormatError

NAMES: Mapping[str, str] = MappingProxyType({"fp32": "F32", "bf16": "BF16", "fp16": "F16"})
FLOATS = ("F32", "BF16", "F16")


def cast(stored: np.ndarray, have: str, want: str, where: object) -> np.ndarray:
    """Cast numbers to another dtype, rounded to nearest, ties to even.

    Args:
        stored: values in the dtype `have`; bfloat16 as uint16 bits.
        have, want: two of FLOATS; if equal, `stored` is returned unchanged.
        where: names the tensor in the message.

    Raises:
        FormatError: a finite number would become infinite.
    """
    if have == want:
        return stored
    number = as_float32(stored, have)
    out = round_float32(number, want)
    infinite = (out & 0x7FFF) == 0x7F80 if want == "BF16" else np.isinf(out)
    if infinite.any() and (overflowed := infinite & np.isfinite(number)).any():
        raise FormatError(
            where,
            f"too large for {want}",
            found=float(number[overflowed][0]),
            hint="--dtype bf16 or --dtype fp32" if want == "F16" else "--dtype fp32",
        )
    return out


def round_float32(number: np.ndarray, want: str) -> np.ndarray:
    """Round float32 numbers to nearest, ties to even; values out of range become infinite, as in torch."""
    if want == "BF16":
        return _to_bfloat16(number)
    with np.errstate(over="ignore"):
        return number.astype(DTYPES[want])


def as_float32(stored: np.ndarray, have: str) -> np.ndarray:
    """Convert stored values of one of FLOATS to float32, which is exact."""
    if have == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def as_float64(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Convert stored values to float64."""
    return (as_float32(stored, dtype) if dtype == "BF16" else stored).astype(np.float64)


def _to_bfloat16(number: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bits; NaN stays NaN."""
    bits = np.ascontiguousarray(number).view(np.uint32)
    # one array for all steps: in a virtual machine new memory costs more than the arithmetic
    half = bits >> 16
    half &= 1
    half += 0x7FFF
    half += bits
    half >>= 16
    out = half.astype(np.uint16)
    nan = np.isnan(number)
    if nan.any():
        out[nan] = bits[nan] >> 16 | 0x40
    return out
