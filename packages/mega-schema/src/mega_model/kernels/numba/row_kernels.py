"""Norms and activations of rows on a CPU, compiled by numba; `kernels.reference` defines them.

Rows are float32, or bfloat16 as uint16. Arithmetic is in float32, and results are rounded where torch's
operations round them. A row's result does not depend on the other rows.

Legend: R rows; D width of the residual stream; F width inside the feed-forward.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import numpy as np
from numba import njit

from mega_model.kernels.numba.simd import LANES, bf16_to_float, build_activation, round_like

GELU_TANH, GELU_ERF, SWIGLU = range(3)

_gelu_tanh = build_activation("gelu_tanh")
_gelu_erf = build_activation("gelu_erf")
_silu = build_activation("silu")


@njit(nogil=True, cache=True)
def round_as(array, x):
    """Return a float32 number rounded to the dtype of `array`."""
    return bf16_to_float(round_like(array, x))


# sums in any order, so that LLVM computes them with vectors; one order per width
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _row_moments(row):
    """Return the mean and the variance of a row of float32."""
    total = np.float32(0.0)
    for i in range(len(row)):
        total += row[i]
    mean = total / np.float32(len(row))
    squares = np.float32(0.0)
    for i in range(len(row)):
        squares += (row[i] - mean) * (row[i] - mean)
    return mean, squares / np.float32(len(row))


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _mean_square(row):
    squares = np.float32(0.0)
    for i in range(len(row)):
        squares += row[i] * row[i]
    return squares / np.float32(len(row))


@njit(nogil=True, cache=True)
def norm_row(x, weight, bias, eps, out, row):
    """Set `out` to the LayerNorm of x, or without a bias to its RMSNorm.

    Args:
        x, out: (D,).
        weight: (D,).
        bias: (D,), or empty.
        row: (D,) float32 scratch.
    """
    width = len(x)
    for i in range(width):
        row[i] = bf16_to_float(x[i])
    if len(bias) == 0:
        scale = np.float32(1.0) / np.sqrt(_mean_square(row) + eps)
        for i in range(width):
            out[i] = round_like(out, round_as(out, row[i] * scale) * bf16_to_float(weight[i]))
    else:
        mean, variance = _row_moments(row)
        scale = np.float32(1.0) / np.sqrt(variance + eps)
        for i in range(width):
            value = (row[i] - mean) * scale * bf16_to_float(weight[i]) + bf16_to_float(bias[i])
            out[i] = round_like(out, value)


@njit(nogil=True, cache=True)
def activate_row(x, bias, activation, out, row):
    """Set `out` to the activation of x.

    Args:
        x: (F,), or (2 F,) for SWIGLU.
        bias: (F,), added first, or empty; empty for SWIGLU.
        activation: GELU_TANH, GELU_ERF or SWIGLU.
        out: (F,).
        row: float32 scratch, F rounded up to a multiple of 16.
    """
    width = len(out)
    vectors = (width + LANES - 1) // LANES
    for i in range(width):
        value = bf16_to_float(x[i])
        if len(bias):
            value = round_as(out, value + bf16_to_float(bias[i]))
        row[i] = value
    if activation == GELU_TANH:
        _gelu_tanh(row, 0, vectors)
    elif activation == GELU_ERF:
        _gelu_erf(row, 0, vectors)
    else:
        _silu(row, 0, vectors)
    if activation == SWIGLU:
        for i in range(width):
            out[i] = round_like(out, round_as(out, row[i]) * bf16_to_float(x[width + i]))
    else:
        for i in range(width):
            out[i] = round_like(out, row[i])
