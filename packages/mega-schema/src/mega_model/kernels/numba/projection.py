"""Products of up to three rows with a packed weight, for kernels that compute a whole layer.

A weight has the layout of `linear`; a kernel knows it by its address, so that one call can take the weights
of all layers.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

from mega_model.kernels.numba.row_kernels import round_as
from mega_model.kernels.numba.simd import bf16_to_float, build_bf16_panel, build_tile_product, round_like

MAX_ROWS = 3
PANEL = 64
_BLOCK_PAIRS = 256  # after which oneDNN, and so `linear`, adds sums of pairs

_bf16_1, _bf16_2, _bf16_3 = (build_bf16_panel(rows, 4) for rows in (1, 2, 3))
_float_1, _float_2, _float_3 = (build_tile_product(rows, 4) for rows in (1, 2, 3))


@intrinsic
def _as_pointer(typing_context, address):
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@njit(nogil=True, cache=True)
def array_at(address, count, like):
    """Return the `count` numbers at an address as an array with the dtype of `like`."""
    return carray(_as_pointer(address), (count,), like.dtype)


def _multiply_panel(x, weight, start, sums, block):
    """Set sums[r] to the product of row r of x and the panel at `start`."""


@overload(_multiply_panel)
def _choose_product(x, weight, start, sums, block):
    if x.dtype == types.float32:
        return _multiply_float_panel
    return _multiply_bf16_panel


def _multiply_float_panel(x, weight, start, sums, block):
    rows, width = x.shape
    sums[:rows] = np.float32(0.0)
    if rows == 1:
        _float_1(x, 0, width, weight, start, PANEL, 16, width, sums, 0, PANEL)
    elif rows == 2:
        _float_2(x, 0, width, weight, start, PANEL, 16, width, sums, 0, PANEL)
    else:
        _float_3(x, 0, width, weight, start, PANEL, 16, width, sums, 0, PANEL)


def _multiply_bf16_panel(x, weight, start, sums, block):
    x_pairs = x.view(np.uint32)
    rows, pairs = x_pairs.shape
    for begin in range(0, pairs, _BLOCK_PAIRS):
        count = min(_BLOCK_PAIRS, pairs - begin)
        place = start + begin * 2 * PANEL
        target = sums if begin == 0 else block
        if rows == 1:
            _bf16_1(x_pairs, begin, pairs, weight, place, count, target)
        elif rows == 2:
            _bf16_2(x_pairs, begin, pairs, weight, place, count, target)
        else:
            _bf16_3(x_pairs, begin, pairs, weight, place, count, target)
        if begin:
            for r in range(rows):
                for o in range(PANEL):
                    sums[r, o] += block[r, o]


@njit(nogil=True, cache=True)
def project(x, weight_address, bias_address, out, is_residual, worker, workers):
    """Compute a worker's panels of out = x Wᵀ + bias, or add that product to `out`.

    Args:
        x: (R, I), R at most 3.
        weight_address: of the packed weight.
        bias_address: of (O,) numbers with the dtype of x; 0: no bias.
        out: (R, O).
        is_residual: round the product, add the bias and round, add it to `out` and round, as torch's
            operations do one by one.
        worker, workers: consecutive panels belong to one worker.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    size = PANEL * ((inputs + PANEL - 1) // PANEL * PANEL)
    panels = (outputs + PANEL - 1) // PANEL
    weight = array_at(weight_address, panels * size, out)
    bias = array_at(bias_address, outputs if bias_address else 0, out)
    sums = np.empty((MAX_ROWS, PANEL), np.float32)
    block = np.empty((MAX_ROWS, PANEL), np.float32)
    for panel in range(worker * panels // workers, (worker + 1) * panels // workers):
        _multiply_panel(x, weight, panel * size, sums, block)
        first = panel * PANEL
        count = min(PANEL, outputs - first)
        for r in range(rows):
            if is_residual:
                for o in range(count):
                    value = round_as(out, sums[r, o])
                    if len(bias):
                        value = round_as(out, value + bf16_to_float(bias[first + o]))
                    out[r, first + o] = round_like(out, bf16_to_float(out[r, first + o]) + value)
            else:
                for o in range(count):
                    value = sums[r, o]
                    if len(bias):
                        value += bf16_to_float(bias[first + o])
                    out[r, first + o] = round_like(out, value)
