"""Products whose sums have one order for any number of rows and ranks, compiled by numba.

Weights are in panels of 64 outputs, with I and O rounded up to multiples of 64:

    float32   (O / 64, I, 64)
    bfloat16  (O / 64, I / 2, 64, 2)     pairs of inputs, for AVX-512's VDPBF16PS

The inputs are cut into segments (`mega_schema.row_segments`). Within a segment the inputs, or the pairs, are
added in order; the sums of the segments are added in a binary tree. A panel is read once for a tile of rows,
and no row's sum depends on the others.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.output_tiles import store_tile
from mega_model.kernels.numba.panel_products import build_bf16_panel
from mega_model.kernels.numba.simd import build_tile_product

PANEL = 64
TILE_ROWS = 6  # with 4 vectors of outputs: 24 sums, 4 weights and an input in AVX-512's 32 registers
LEVELS = 5  # of the tree of segments: up to 16 leaves

_bf16_1, _bf16_2, _bf16_3, _bf16_4, _bf16_6 = (build_bf16_panel(rows, 4) for rows in (1, 2, 3, 4, 6))
_float_1, _float_2, _float_3, _float_4, _float_6 = (
    build_tile_product(rows, 4, accumulate=False) for rows in (1, 2, 3, 4, 6)
)


@njit(nogil=True, cache=True)
def _tile_rows(left):
    """Return the rows of the next tile: 6, 4, 3, 2 or 1."""
    if left >= TILE_ROWS:
        return TILE_ROWS
    return 4 if left >= 4 else left


@njit(nogil=True, cache=True)
def _add_up(sums, top, rows):
    """Add the tree's last subtree to the one before it."""
    for r in range(rows):
        for o in range(PANEL):
            sums[top - 1, r, o] += sums[top, r, o]


@njit(nogil=True, cache=True)
def _bf16_tile(x, row, rows, weight, start, segments, sums):
    """Set sums[0, r] to the product of row `row` + r and a panel."""
    pairs = x.shape[1]
    length = pairs // segments
    top = 0
    for segment in range(segments):
        first = row * pairs + segment * length
        place = start + segment * length * 2 * PANEL
        if rows == 6:
            _bf16_6(x, first, pairs, weight, place, length, sums[top])
        elif rows == 4:
            _bf16_4(x, first, pairs, weight, place, length, sums[top])
        elif rows == 3:
            _bf16_3(x, first, pairs, weight, place, length, sums[top])
        elif rows == 2:
            _bf16_2(x, first, pairs, weight, place, length, sums[top])
        else:
            _bf16_1(x, first, pairs, weight, place, length, sums[top])
        leaves = segment + 1
        while leaves % 2 == 0:
            _add_up(sums, top, rows)
            top -= 1
            leaves //= 2
        top += 1


@njit(nogil=True, cache=True)
def _float_tile(x, row, rows, weight, start, segments, sums):
    """Set sums[0, r] to the product of row `row` + r and a panel."""
    width = x.shape[1]
    length = width // segments
    top = 0
    for segment in range(segments):
        first = row * width + segment * length
        place = start + segment * length * PANEL
        if rows == 6:
            _float_6(x, first, width, weight, place, PANEL, 16, length, sums[top], 0, PANEL)
        elif rows == 4:
            _float_4(x, first, width, weight, place, PANEL, 16, length, sums[top], 0, PANEL)
        elif rows == 3:
            _float_3(x, first, width, weight, place, PANEL, 16, length, sums[top], 0, PANEL)
        elif rows == 2:
            _float_2(x, first, width, weight, place, PANEL, 16, length, sums[top], 0, PANEL)
        else:
            _float_1(x, first, width, weight, place, PANEL, 16, length, sums[top], 0, PANEL)
        leaves = segment + 1
        while leaves % 2 == 0:
            _add_up(sums, top, rows)
            top -= 1
            leaves //= 2
        top += 1


def _multiply_bf16(x, weight, bias, out, panel_size, segments, threads):
    """Compute out = x Wᵀ + bias.

    Args:
        x: (R, I / 2) uint32, pairs of bfloat16.
        weight: the panels as a flat uint16 array.
        bias: (O,) uint16, or empty.
        out: (R, O), uint16 or float32.
        panel_size: elements of a panel.
        segments: a power of two that divides I / 2.
        threads: workers; each computes consecutive panels.
    """
    rows = len(out)
    panels = (out.shape[1] + PANEL - 1) // PANEL
    for worker in prange(threads):
        sums = np.empty((LEVELS, TILE_ROWS, PANEL), np.float32)
        for panel in range(worker * panels // threads, (worker + 1) * panels // threads):
            row = 0
            while row < rows:
                count = _tile_rows(rows - row)
                _bf16_tile(x, row, count, weight, panel * panel_size, segments, sums)
                store_tile(sums[0], row, count, panel * PANEL, bias, out)
                row += count


def _multiply_float(x, weight, bias, out, panel_size, segments, threads):
    """Compute out = x Wᵀ + bias, all float32; as `_multiply_bf16`, x is (R, I)."""
    rows = len(out)
    panels = (out.shape[1] + PANEL - 1) // PANEL
    for worker in prange(threads):
        sums = np.empty((LEVELS, TILE_ROWS, PANEL), np.float32)
        for panel in range(worker * panels // threads, (worker + 1) * panels // threads):
            row = 0
            while row < rows:
                count = _tile_rows(rows - row)
                _float_tile(x, row, count, weight, panel * panel_size, segments, sums)
                store_tile(sums[0], row, count, panel * PANEL, bias, out)
                row += count


def _pack(weight, panels, threads):
    """Copy a weight into panels; what lies beyond O and I keeps its value.

    Args:
        weight: (O, I) float32, or (O, I / 2) uint32 for pairs of bfloat16.
        panels: (O / 64, I or I / 2, 64), of the same dtype.
    """
    outputs, inputs = weight.shape
    for worker in prange(threads):
        for panel in range(worker * len(panels) // threads, (worker + 1) * len(panels) // threads):
            rows = weight[panel * PANEL : min(outputs, (panel + 1) * PANEL)]
            # lines of the panel are written once, in order; a column of `rows` shares its cache lines with
            # the next ones, and all of them fit in the first cache
            for i in range(inputs):
                line = panels[panel, i]
                for o in range(len(rows)):
                    line[o] = rows[o, i]


bf16_serial, bf16_parallel = build_forms(_multiply_bf16)
float_serial, float_parallel = build_forms(_multiply_float)
pack_serial, pack_parallel = build_forms(_pack)
