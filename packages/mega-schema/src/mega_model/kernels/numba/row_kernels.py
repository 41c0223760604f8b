"""Norms and activations of rows on a CPU, compiled by numba; `kernels.reference` defines them.

Rows are float32, or bfloat16 as uint16. Arithmetic is in float32, and results are rounded where torch's
operations round them. A row's result does not depend on the other rows. RMSNorm and the activations have the
same bits in every kernel that calls them, so that batch-invariant passes use them too; LayerNorm does not,
because LLVM chooses the order of its sums where it inlines them.

Legend: R rows; D width of the residual stream; F width inside the feed-forward.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.simd import LANES, bf16_to_float, build_activation, round_like, sum_squares

GELU_TANH, GELU_ERF, SWIGLU = range(3)

_gelu_tanh = build_activation("gelu_tanh")
_gelu_erf = build_activation("gelu_erf")
_silu = build_activation("silu")


@njit(nogil=True, cache=True)
def padded_width(width):
    """Return a width rounded up to whole vectors."""
    return (width + LANES - 1) // LANES * LANES


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


@njit(nogil=True, cache=True)
def norm_row(x, weight, bias, eps, out, row):
    """Set `out` to the LayerNorm of x, or without a bias to its RMSNorm.

    Args:
        x, out: (D,).
        weight: (D,).
        bias: (D,), or empty.
        row: float32 scratch of `padded_width(D)`, with zeros beyond D.
    """
    width = len(x)
    for i in range(width):
        row[i] = bf16_to_float(x[i])
    if len(bias) == 0:
        mean_square = sum_squares(row, 0, len(row) // LANES) / np.float32(width)
        scale = np.float32(1.0) / np.sqrt(mean_square + eps)
        for i in range(width):
            out[i] = round_like(out, round_as(out, row[i] * scale) * bf16_to_float(weight[i]))
    else:
        mean, variance = _row_moments(row[:width])
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
        row: float32 scratch of `padded_width(F)`.
    """
    width = len(out)
    vectors = len(row) // LANES
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


def _norm_rows(x, weight, bias, eps, out, threads):
    """Norm all rows, as `norm_row`."""
    for worker in prange(threads):
        row = np.zeros(padded_width(x.shape[1]), np.float32)
        for r in range(worker * len(x) // threads, (worker + 1) * len(x) // threads):
            norm_row(x[r], weight, bias, eps, out[r], row)


def _add_norm_rows(x, residual, weight, bias, eps, total, out, threads):
    """Set `total` to x + residual, rounded, and `out` to its norm."""
    for worker in prange(threads):
        row = np.zeros(padded_width(x.shape[1]), np.float32)
        for r in range(worker * len(x) // threads, (worker + 1) * len(x) // threads):
            for i in range(x.shape[1]):
                total[r, i] = round_like(total, bf16_to_float(x[r, i]) + bf16_to_float(residual[r, i]))
            norm_row(total[r], weight, bias, eps, out[r], row)


def _activate_rows(x, bias, activation, out, threads):
    """Apply an activation to all rows, as `activate_row`."""
    for worker in prange(threads):
        row = np.zeros(padded_width(out.shape[1]), np.float32)
        for r in range(worker * len(x) // threads, (worker + 1) * len(x) // threads):
            activate_row(x[r], bias, activation, out[r], row)


norm_rows_serial, norm_rows_parallel = build_forms(_norm_rows)
add_norm_rows_serial, add_norm_rows_parallel = build_forms(_add_norm_rows)
activate_rows_serial, activate_rows_parallel = build_forms(_activate_rows)
