"""Exponentials, cosines and sines whose bits do not depend on an element's place, compiled by numba.

torch computes the last elements of a tensor, or of a thread's part of it, by other code than the rest. Here
an element is a fixed sequence of additions, products and conversions, which are exact or rounded alike in a
vector and alone. Arrays are float32, or uint16 with the bits of bfloat16.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.simd import bf16_to_float
from mega_model.kernels.numba.vector_ir import EXP_MIN, EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2_E

SUM_BITS = 40  # of the fraction of a weight in `exp_sums`

_f = np.float32
_ONE = _f(1.0)
_EXP_MIN, _LOG2_E, _LN2_HIGH, _LN2_LOW = map(_f, (EXP_MIN, LOG2_E, LN2_HIGH, LN2_LOW))
_E5, _E4, _E3, _E2, _E1, _E0 = map(_f, EXP_TERMS)
_FIXED_POINT = _f(2.0**SUM_BITS)

# π/2 in three parts of 33 bits, so that a product with a small integer is exact
_PI_2_1 = 1.57079632673412561417e00
_PI_2_2 = 6.07710050630396597660e-11
_PI_2_3 = 2.02226624879595063154e-21
_TWO_PI = 2.0 / math.pi
_S3, _S5, _S7, _S9, _S11, _S13, _S15 = (
    (-1) ** (n // 2) / float(math.factorial(n)) for n in (3, 5, 7, 9, 11, 13, 15)
)
_C2, _C4, _C6, _C8, _C10, _C12, _C14, _C16 = (
    (-1) ** (n // 2) / float(math.factorial(n)) for n in (2, 4, 6, 8, 10, 12, 14, 16)
)


@njit(nogil=True, cache=True, inline="always")
def _exp(x):
    """Compute e^x of x <= 0, to about one unit in the last place; e^-87 below -87.

    It is `vector_ir.compute_exp` for one number, without FMA: LLVM vectorizes the loop over a row as a whole,
    with its conversions to integers.
    """
    x = max(x, _EXP_MIN)
    power = np.rint(x * _LOG2_E)
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    terms = ((((_E5 * rest + _E4) * rest + _E3) * rest + _E2) * rest + _E1) * rest + _E0
    value = terms * rest * rest + (rest + _ONE)
    return value * bf16_to_float(np.uint16((np.int32(power) + np.int32(127)) << np.int32(7)))


@njit(nogil=True, cache=True)
def _exp_sum_row(logits, largest):
    total = np.int64(0)
    for v in range(len(logits)):
        total += np.int64(_exp(bf16_to_float(logits[v]) - largest) * _FIXED_POINT)
    return total


def _exp_sums(logits, largest, out, threads):
    """Set out to Σ e^(z - largest) of every row, in units of 2^-40.

    Sums of integers are the same in any order, over any number of ranks.

    Args:
        logits: (R, V).
        largest: (R,) float32, at least the row's largest.
        out: (R,) int64.
    """
    for worker in prange(threads):
        for r in range(worker * len(logits) // threads, (worker + 1) * len(logits) // threads):
            out[r] = _exp_sum_row(logits[r], largest[r])


@njit(nogil=True, cache=True, inline="always")
def _cos_sin(angle):
    """Compute the cosine and sine of a float64 angle, to about 1e-16 up to 1e6."""
    quarter = np.rint(angle * _TWO_PI)
    r = angle - quarter * _PI_2_1 - quarter * _PI_2_2 - quarter * _PI_2_3
    s = r * r
    sine = r + r * s * (_S3 + s * (_S5 + s * (_S7 + s * (_S9 + s * (_S11 + s * (_S13 + s * _S15))))))
    cosine = 1.0 + s * (
        _C2 + s * (_C4 + s * (_C6 + s * (_C8 + s * (_C10 + s * (_C12 + s * (_C14 + s * _C16))))))
    )
    turn = np.int64(quarter) & 3
    if turn == 0:
        return cosine, sine
    if turn == 1:
        return -sine, cosine
    if turn == 2:
        return -cosine, -sine
    return sine, -cosine


@njit(nogil=True, cache=True)
def angles(position, frequency, cos, sin):
    """Set cos and sin, (T, R) float32, to those of position · frequency, which is rounded to float32."""
    for t in range(len(position)):
        for i in range(len(frequency)):
            c, s = _cos_sin(np.float64(position[t] * frequency[i]))
            cos[t, i] = _f(c)
            sin[t, i] = _f(s)


exp_sums_serial, exp_sums_parallel = build_forms(_exp_sums)
