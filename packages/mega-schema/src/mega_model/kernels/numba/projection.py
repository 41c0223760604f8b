"""Products with a packed weight that is known by its address, for kernels that compute a whole layer.

A weight has the layout of `linear`. One call of a kernel can so take the weights of all layers.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic, overload

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.linear import PANEL, bf16_tile, float_tile, quantize_rows
from mega_model.kernels.numba.output_tiles import store_tile
from mega_model.kernels.numba.panel_products import build_int8_panel
from mega_model.kernels.numba.row_kernels import round_as
from mega_model.kernels.numba.simd import bf16_to_float, round_like

_TILE_ROWS = 4
# columns of a table of addresses: of weights, then of their biases, scales and sums
BIASES, SCALES, SUMS, COLUMNS = 6, 12, 18, 24

_int8_1, _int8_2, _int8_3, _int8_4 = (build_int8_panel(rows, 4) for rows in (1, 2, 3, 4))


@intrinsic
def _as_pointer(typing_context, address):
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@njit(nogil=True, cache=True)
def array_at(address, count, like):
    """Return the `count` numbers at an address as an array with the dtype of `like`."""
    return carray(_as_pointer(address), (count,), like.dtype)


@njit(nogil=True, cache=True)
def _quantize(x):
    """Return rows as integers, as `linear.quantize_rows`, in fours, and the scale of each row."""
    rows, width = x.shape
    integers = np.zeros((rows, (width + 3) // 4 * 4), np.uint8)
    scales = np.empty(rows, np.float32)
    quantize_rows(x, integers[:, :width], scales)
    return integers, scales


def _prepare(x, weights):
    """Return the factors of products with weights of this dtype, and the scales of the rows, if any."""


@overload(_prepare)
def _choose_preparation(x, weights):
    if weights.dtype == types.int8:
        return lambda x, weights: _quantize(x)
    return lambda x, weights: (x, np.empty(0, np.float32))


def _multiply_panel(x, row, rows, weight, start, sums, block):
    """Set sums[r], of integers block[r], to the product of row `row` + r of x and the panel at `start`."""


@overload(_multiply_panel)
def _choose_product(x, row, rows, weight, start, sums, block):
    if weight.dtype == types.float32:
        return _multiply_float_panel
    return _multiply_int8_panel if weight.dtype == types.int8 else _multiply_bf16_panel


def _multiply_float_panel(x, row, rows, weight, start, sums, block):
    float_tile(x, row, rows, weight, start, sums)


def _multiply_bf16_panel(x, row, rows, weight, start, sums, block):
    bf16_tile(x.view(np.uint32), row, rows, weight, start, sums, block)


def _multiply_int8_panel(x, row, rows, weight, start, sums, block):
    x_fours = x.view(np.uint32)
    fours = x_fours.shape[1]
    first = row * fours
    integers = block.view(np.int32)
    if rows == 1:
        _int8_1(x_fours, first, fours, weight, start, fours, integers)
    elif rows == 2:
        _int8_2(x_fours, first, fours, weight, start, fours, integers)
    elif rows == 3:
        _int8_3(x_fours, first, fours, weight, start, fours, integers)
    else:
        _int8_4(x_fours, first, fours, weight, start, fours, integers)


@njit(nogil=True, cache=True)
def project(x, weights, layer, column, has_bias, out, is_residual, worker, workers):
    """Compute a worker's panels of out = x Wᵀ + bias, or add that product to `out`.

    Args:
        x: (R, I).
        weights: an array with the dtype of the packed weight; bfloat16 as uint16.
        layer: addresses: layer[column] of the packed weight; layer[BIASES + column] of its bias, (O,) with
            the dtype of x, or 0; of int8 weights, layer[SCALES + column] of the scale of each output,
            float32, and layer[SUMS + column] of 128 times the sum of its weights, int32.
        out: (R, O).
        is_residual: round the product, add the bias and round, add it to `out` and round, as torch's
            operations do one by one.
        worker, workers: consecutive panels belong to one worker.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    size = PANEL * ((inputs + PANEL - 1) // PANEL * PANEL)
    panels = (outputs + PANEL - 1) // PANEL
    weight = array_at(layer[column], panels * size, weights)
    bias = array_at(layer[BIASES + column], outputs if has_bias and layer[BIASES + column] else 0, out)
    sums = np.empty((_TILE_ROWS, PANEL), np.float32)
    block = np.empty((_TILE_ROWS, PANEL), np.float32)
    factors, x_scales = _prepare(x, weights)
    scales = array_at(layer[SCALES + column], outputs if len(x_scales) else 0, sums)
    integers = block.view(np.int32)
    zeros = array_at(layer[SUMS + column], outputs if len(x_scales) else 0, integers)
    for panel in range(worker * panels // workers, (worker + 1) * panels // workers):
        first = panel * PANEL
        count = min(PANEL, outputs - first)
        for row in range(0, rows, _TILE_ROWS):
            tile_rows = min(_TILE_ROWS, rows - row)
            _multiply_panel(factors, row, tile_rows, weight, panel * size, sums, block)
            if len(x_scales):
                for r in range(tile_rows):
                    for o in range(count):
                        total = np.int32(integers[r, o] - zeros[first + o])
                        sums[r, o] = np.float32(total) * scales[first + o] * x_scales[row + r]
            _store_panel(sums, row, tile_rows, first, count, bias, out, is_residual)


@njit(nogil=True, cache=True)
def _store_panel(sums, row, rows, first, count, bias, out, is_residual):
    if not is_residual:
        store_tile(sums, row, rows, first, bias, out)
        return
    for r in range(rows):
        for o in range(count):
            value = round_as(out, sums[r, o])
            if len(bias):
                value = round_as(out, value + bf16_to_float(bias[first + o]))
            total = bf16_to_float(out[row + r, first + o]) + value
            out[row + r, first + o] = round_like(out, total)


def _project_rows(x, weights, layer, out, threads):
    """Compute out = x Wᵀ + bias of a weight in column 0 of a layer, see `project`."""
    for worker in prange(threads):
        project(x, weights, layer, 0, True, out, False, worker, threads)


rows_serial, rows_parallel = build_forms(_project_rows)
