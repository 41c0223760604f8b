"""Store a tile of float32 sums in an array, rounded to its dtype; LLVM does not vectorize such a loop."""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mega_model.kernels.numba.simd import bf16_to_float, round_like
from mega_model.kernels.numba.vector_ir import (
    HALVES,
    LANES,
    bf16_bits,
    data_pointer,
    load_vector,
    offset_at,
    store_vector,
)


@intrinsic
def _narrow(typing_context, values, first, vectors, out, start):
    """Set out[start:], float32 or bfloat16, to 16 · `vectors` float32 numbers from values[first], rounded."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data, out_data = (data_pointer(context, builder, sig.args[i], args[i]) for i in (0, 3))
        with cgutils.for_range(builder, args[2]) as loop:
            step = offset_at(builder, ir.Constant(ir.IntType(64), 0), loop.index, LANES)
            numbers = load_vector(builder, sig.args[0], data, builder.add(args[1], step))
            _store_rounded(builder, sig.args[3], out_data, builder.add(args[4], step), numbers)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.intp, out, types.intp), generate


@intrinsic
def _add_narrow(typing_context, values, first, bias, bias_start, vectors, out, start):
    """As `_narrow`, after adding bias[bias_start:], float32 or bfloat16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data, bias_data, out_data = (data_pointer(context, builder, sig.args[i], args[i]) for i in (0, 2, 5))
        with cgutils.for_range(builder, args[4]) as loop:
            step = offset_at(builder, ir.Constant(ir.IntType(64), 0), loop.index, LANES)
            numbers = load_vector(builder, sig.args[0], data, builder.add(args[1], step))
            added = load_vector(builder, sig.args[2], bias_data, builder.add(args[3], step))
            total = builder.fadd(numbers, added)
            _store_rounded(builder, sig.args[5], out_data, builder.add(args[6], step), total)
        return context.get_dummy_value()

    size = types.intp
    return types.void(values, size, bias, size, size, out, size), generate


def _store_rounded(builder: Any, array_type: Any, data: Any, place: Any, values: Any) -> None:
    """Store 16 numbers as elements of an array: themselves, or the bits of the nearest bfloat16."""
    if array_type.dtype == types.float32:
        store_vector(builder, data, place, values)
        return
    pointer = builder.bitcast(builder.gep(data, [place]), HALVES.as_pointer())
    builder.store(bf16_bits(builder, values), pointer).align = 2


@njit(nogil=True, cache=True)
def store_tile(sums, row, rows, first, bias, out):
    """Set out[row + r, first:] to sums[r] + bias[first:], as far as `out` has columns.

    Args:
        sums: float32, a panel of outputs for each of `rows` rows.
        bias: of all columns, or empty.
    """
    columns = min(sums.shape[1], out.shape[1] - first)
    vectors = columns // LANES
    for r in range(rows):
        target = out[row + r]
        if len(bias):
            _add_narrow(sums[r], 0, bias, first, vectors, target, first)
            for o in range(vectors * LANES, columns):
                target[first + o] = round_like(out, sums[r, o] + bf16_to_float(bias[first + o]))
        else:
            _narrow(sums[r], 0, vectors, target, first)
            for o in range(vectors * LANES, columns):
                target[first + o] = round_like(out, sums[r, o])
