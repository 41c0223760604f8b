"""Functions of one row or one element whose result no other row changes, compiled by numba.

torch computes the last elements of a tensor, or of a thread's part of it, by other code than the rest, so an
element's bits depend on its place. Here an element is a fixed sequence of additions, products and
conversions, which are exact or rounded alike in a vector and alone. Sums over a row have 16 lanes. Arrays are
float32, or uint16 with the bits of bfloat16.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.simd import LANES, bf16_to_float, round_like
from mega_model.kernels.numba.vectors import exponentials, logistic, narrow, widen

SUM_BITS = 40  # of the fraction of a weight in `exp_sums`
_PART = 256  # elements of a row that are computed at a time

_f = np.float32
_ONE, _HALF = _f(1.0), _f(0.5)
_EXP_MIN = _f(-87.0)
_LOG2_E = _f(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = _f(0.693359375), _f(-2.12194440e-4)  # Cody and Waite: the first has few bits
# e^r on |r| <= ln 2 / 2: the polynomial of Cephes' expf
_E5, _E4, _E3 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_E2, _E1, _E0 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(0.5)
_FIXED_POINT = _f(2.0**SUM_BITS)

_GELU_SCALE, _GELU_CUBE = _f(2 * math.sqrt(2 / math.pi)), _f(0.044715)
# 1 - erf(z) = t (a1 + ...) e^-z², t = 1 / (1 + p z), to 1.5e-7: Abramowitz and Stegun 7.1.26
_ERF_P = _f(0.3275911)
_ERF_1, _ERF_2, _ERF_3 = _f(0.254829592), _f(-0.284496736), _f(1.421413741)
_ERF_4, _ERF_5 = _f(-1.453152027), _f(1.061405429)
_SQRT_HALF = _f(math.sqrt(0.5))

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
    """Compute e^x of x <= 0, to about one unit in the last place; e^-87 below -87."""
    x = max(x, _EXP_MIN)
    power = np.rint(x * _LOG2_E)
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    terms = ((((_E5 * rest + _E4) * rest + _E3) * rest + _E2) * rest + _E1) * rest + _E0
    value = terms * rest * rest + (rest + _ONE)
    return value * bf16_to_float(np.uint16((np.int32(power) + np.int32(127)) << np.int32(7)))


@njit(nogil=True, cache=True)
def _load(x, start, count, out):
    """Set out[:count], float32, to x[start:]."""
    whole = count // LANES * LANES
    widen(x, start, whole // LANES, out)
    for i in range(whole, count):
        out[i] = bf16_to_float(x[start + i])


@njit(nogil=True, cache=True)
def _store(values, count, out, start):
    """Set out[start:], rounded, to values[:count]."""
    whole = count // LANES * LANES
    narrow(values, 0, whole // LANES, out, start)
    for i in range(whole, count):
        out[start + i] = round_like(out, values[i])


@njit(nogil=True, cache=True)
def _gelu_row(x, bias, tanh, u, work, out):
    """Compute a row in parts of _PART elements; the end of the last part holds numbers of an earlier one."""
    for start in range(0, len(x), _PART):
        count = min(_PART, len(x) - start)
        vectors = (count + LANES - 1) // LANES
        _load(x, start, count, u)
        if len(bias):
            _load(bias, start, count, work)
            for i in range(count):
                u[i] += work[i]
        if tanh:
            for i in range(_PART):
                work[i] = _GELU_SCALE * (u[i] + _GELU_CUBE * u[i] * u[i] * u[i])
            logistic(work, vectors)
            for i in range(_PART):
                u[i] *= work[i]
        else:
            for i in range(_PART):
                z = u[i] * _SQRT_HALF
                work[i] = -(z * z)
            exponentials(work, vectors)
            for i in range(_PART):
                t = _ONE / (_ONE + _ERF_P * (abs(u[i]) * _SQRT_HALF))
                terms = ((((_ERF_5 * t + _ERF_4) * t + _ERF_3) * t + _ERF_2) * t + _ERF_1) * t
                tail = terms * work[i] * _HALF
                u[i] *= _ONE - tail if u[i] >= _f(0.0) else tail
        _store(u, count, out, start)


@njit(nogil=True, cache=True)
def _swiglu_row(x, gate, work, out):
    """Compute a row in parts, as `_gelu_row`."""
    half = len(out)
    for start in range(0, half, _PART):
        count = min(_PART, half - start)
        _load(x, start, count, gate)
        for i in range(_PART):
            work[i] = gate[i]
        logistic(work, (count + LANES - 1) // LANES)
        for i in range(_PART):
            gate[i] *= work[i]
        _load(x, half + start, count, work)
        for i in range(_PART):
            gate[i] *= work[i]
        _store(gate, count, out, start)


@njit(nogil=True, cache=True)
def _rms_norm_row(x, scale, eps, lanes, out):
    lanes[:] = _f(0.0)
    whole = len(x) // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            value = bf16_to_float(x[first + lane])
            lanes[lane] += value * value
    for i in range(whole, len(x)):
        value = bf16_to_float(x[i])
        lanes[i - whole] += value * value
    total = _f(0.0)
    for lane in range(LANES):
        total += lanes[lane]
    factor = _ONE / np.sqrt(total / _f(len(x)) + eps)
    for i in range(len(x)):
        normed = bf16_to_float(round_like(out, bf16_to_float(x[i]) * factor))
        out[i] = round_like(out, normed * bf16_to_float(scale[i]))


def _gelu(x, bias, tanh, out, threads):
    """Set out to gelu(x + bias): (R, F); bias (F,) or empty."""
    for worker in prange(threads):
        u, work = np.zeros(_PART, np.float32), np.zeros(_PART, np.float32)
        for r in range(worker * len(x) // threads, (worker + 1) * len(x) // threads):
            _gelu_row(x[r], bias, tanh, u, work, out[r])


def _swiglu(x, out, threads):
    """Set out, (R, F), to silu(gate) · up of x, (R, 2F)."""
    for worker in prange(threads):
        gate, work = np.zeros(_PART, np.float32), np.zeros(_PART, np.float32)
        for r in range(worker * len(x) // threads, (worker + 1) * len(x) // threads):
            _swiglu_row(x[r], gate, work, out[r])


def _rms_norm(x, scale, eps, out, threads):
    """Set out to x / rms(x), rounded, times scale: (R, D)."""
    for worker in prange(threads):
        lanes = np.empty(LANES, np.float32)
        for r in range(worker * len(x) // threads, (worker + 1) * len(x) // threads):
            _rms_norm_row(x[r], scale, eps, lanes, out[r])


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


gelu_serial: Any = njit(nogil=True, cache=True)(_gelu)
gelu_parallel: Any = njit(nogil=True, cache=True, parallel=True)(_gelu)
swiglu_serial: Any = njit(nogil=True, cache=True)(_swiglu)
swiglu_parallel: Any = njit(nogil=True, cache=True, parallel=True)(_swiglu)
rms_norm_serial: Any = njit(nogil=True, cache=True)(_rms_norm)
rms_norm_parallel: Any = njit(nogil=True, cache=True, parallel=True)(_rms_norm)
exp_sums_serial: Any = njit(nogil=True, cache=True)(_exp_sums)
exp_sums_parallel: Any = njit(nogil=True, cache=True, parallel=True)(_exp_sums)
