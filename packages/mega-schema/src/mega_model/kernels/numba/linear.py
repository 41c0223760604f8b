"""Products with weights as oneDNN packs them, compiled by numba: one weight in memory for both.

oneDNN's layout has panels of 64 outputs, with I and O rounded up to multiples of 64:

    float32   (O / 64, I, 64)
    bfloat16  (O / 64, I / 2, 64, 2)     pairs of inputs, for AVX-512's VDPBF16PS

A panel is read once for up to 4 rows, in order. The sum of a row has an order that does not depend on the
other rows: float32 adds the inputs in order; bfloat16 adds pairs in order within blocks of 512 inputs, and
then the blocks, which is oneDNN's order for most shapes. A CPU without VDPBF16PS widens a panel to float32
for many rows, whose products it adds in order.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.output_tiles import store_tile
from mega_model.kernels.numba.panel_products import build_bf16_panel
from mega_model.kernels.numba.simd import bf16_to_float, build_tile_product, round_like
from mega_model.kernels.numba.vector_ir import HAS_AVX512, HAS_BF16_PRODUCTS

MAX_ROWS = 3 if HAS_AVX512 else 8  # up to which these products are faster than oneDNN's
PANEL = 64
_ROWS = 4  # of a tile
_WIDE_ROWS = 6  # of a tile of a widened panel
_WIDENED_FROM = 8  # rows for which widening a panel takes less time than it saves
_BLOCK_PAIRS = 256

_bf16_1, _bf16_2, _bf16_3, _bf16_4 = (build_bf16_panel(rows, 4) for rows in (1, 2, 3, 4))
_float_1, _float_2, _float_3, _float_4, _float_6 = (build_tile_product(rows, 4) for rows in (1, 2, 3, 4, 6))


@njit(nogil=True, cache=True)
def bf16_tile(x, row, rows, weight, start, sums, block):
    """Set sums[r] to the product of row `row` + r and a panel, for up to 4 rows."""
    pairs = x.shape[1]
    first = row * pairs
    for begin in range(0, pairs, _BLOCK_PAIRS):
        count = min(_BLOCK_PAIRS, pairs - begin)
        place = start + begin * 2 * PANEL
        target = sums if begin == 0 else block
        if rows == 1:
            _bf16_1(x, first + begin, pairs, weight, place, count, target)
        elif rows == 2:
            _bf16_2(x, first + begin, pairs, weight, place, count, target)
        elif rows == 3:
            _bf16_3(x, first + begin, pairs, weight, place, count, target)
        else:
            _bf16_4(x, first + begin, pairs, weight, place, count, target)
        if begin:
            for r in range(rows):
                for o in range(PANEL):
                    sums[r, o] += block[r, o]


@njit(nogil=True, cache=True)
def float_tile(x, row, rows, weight, start, sums):
    """Set sums[r] to the product of row `row` + r and a panel, for up to 4 rows, or 6."""
    width = x.shape[1]
    first = row * width
    sums[:rows] = np.float32(0.0)
    if rows == 6:
        _float_6(x, first, width, weight, start, PANEL, 16, width, sums, 0, PANEL)
    elif rows == 1:
        _float_1(x, first, width, weight, start, PANEL, 16, width, sums, 0, PANEL)
    elif rows == 2:
        _float_2(x, first, width, weight, start, PANEL, 16, width, sums, 0, PANEL)
    elif rows == 3:
        _float_3(x, first, width, weight, start, PANEL, 16, width, sums, 0, PANEL)
    else:
        _float_4(x, first, width, weight, start, PANEL, 16, width, sums, 0, PANEL)


@njit(nogil=True, cache=True)
def _widen(pairs, first, wide):
    """Set wide to the float32 bits of pairs of bfloat16; the numbers of a pair become rows of `wide`."""
    for p in range(len(wide) // 2):
        for o in range(wide.shape[1]):
            pair = pairs[first + p * wide.shape[1] + o]
            wide[2 * p, o] = pair << np.uint32(16)
            wide[2 * p + 1, o] = pair & np.uint32(0xFFFF0000)


@njit(nogil=True, cache=True)
def _multiply_widened(x, weight, bias, out, panel_size, first_panel, last_panel):
    """Compute a worker's panels as `_multiply_bf16`, with each panel in float32."""
    rows, pairs = x.shape
    x_bits = np.empty((rows, 2 * pairs), np.uint32)
    for r in range(rows):
        for p in range(pairs):
            x_bits[r, 2 * p] = x[r, p] << np.uint32(16)
            x_bits[r, 2 * p + 1] = x[r, p] & np.uint32(0xFFFF0000)
    x_wide = x_bits.view(np.float32)
    bits = np.empty((2 * pairs, PANEL), np.uint32)
    wide = bits.reshape(-1).view(np.float32)
    sums = np.empty((_WIDE_ROWS, PANEL), np.float32)
    for panel in range(first_panel, last_panel):
        _widen(weight.view(np.uint32), panel * panel_size // 2, bits)
        row = 0
        while row < rows:
            count = rows - row
            if count >= _WIDE_ROWS:
                count = _WIDE_ROWS
            elif count > _ROWS:
                count = _ROWS
            float_tile(x_wide, row, count, wide, 0, sums)
            store_tile(sums, row, count, panel * PANEL, bias, out)
            row += count


def _multiply_bf16(x, weight, bias, out, panel_size, threads):
    """Compute out = x Wᵀ + bias.

    Args:
        x: (R, I / 2) uint32, pairs of bfloat16.
        weight: the packed weight as a flat uint16 array.
        bias: (O,) uint16, or empty.
        out: (R, O) uint16.
        panel_size: elements of a panel.
        threads: workers; each computes consecutive panels.
    """
    rows = len(out)
    panels = (out.shape[1] + PANEL - 1) // PANEL
    for worker in prange(threads):
        first_panel, last_panel = worker * panels // threads, (worker + 1) * panels // threads
        if not HAS_BF16_PRODUCTS and rows >= _WIDENED_FROM:
            _multiply_widened(x, weight, bias, out, panel_size, first_panel, last_panel)
            continue
        sums = np.empty((_ROWS, PANEL), np.float32)
        block = np.empty((_ROWS, PANEL), np.float32)
        for panel in range(first_panel, last_panel):
            for row in range(0, rows, _ROWS):
                count = min(_ROWS, rows - row)
                bf16_tile(x, row, count, weight, panel * panel_size, sums, block)
                store_tile(sums, row, count, panel * PANEL, bias, out)


def _multiply_float(x, weight, bias, out, panel_size, threads):
    """Compute out = x Wᵀ + bias, all float32; as `_multiply_bf16`, x is (R, I)."""
    rows = len(out)
    panels = (out.shape[1] + PANEL - 1) // PANEL
    for worker in prange(threads):
        sums = np.empty((_ROWS, PANEL), np.float32)
        for panel in range(worker * panels // threads, (worker + 1) * panels // threads):
            for row in range(0, rows, _ROWS):
                count = min(_ROWS, rows - row)
                float_tile(x, row, count, weight, panel * panel_size, sums)
                store_tile(sums, row, count, panel * PANEL, bias, out)


@njit(nogil=True, cache=True)
def quantize_rows(x, out, scale):
    """Set out to x / scale, rounded to integers, plus 128; the scale of a row maps its largest value to 127.

    Args:
        x: (R, I) uint16, the bits of bfloat16.
        out: (R, I) uint8.
        scale: (R,) float32.
    """
    for r in range(len(x)):
        largest = np.uint16(0)
        for i in range(x.shape[1]):
            largest = max(largest, x[r, i] & np.uint16(0x7FFF))  # magnitudes have the order of their bits
        scale[r] = np.float32(1.0) if largest == 0 else bf16_to_float(np.uint16(largest)) / np.float32(127.0)
        for i in range(x.shape[1]):
            out[r, i] = np.uint8(np.rint(bf16_to_float(x[r, i]) / scale[r]) + np.float32(128.0))


@njit(nogil=True, cache=True)
def rescale_rows(y, scale, bias, out):
    """Set out to y · scale + bias, rounded to bfloat16.

    Args:
        y: (R, O) float32.
        bias: (O,) uint16, or empty.
        out: (R, O) uint16.
    """
    for r in range(len(y)):
        for o in range(y.shape[1]):
            value = y[r, o] * scale[r]
            if len(bias):
                value += bf16_to_float(bias[o])
            out[r, o] = round_like(out, value)


bf16_serial, bf16_parallel = build_forms(_multiply_bf16)
float_serial, float_parallel = build_forms(_multiply_float)
