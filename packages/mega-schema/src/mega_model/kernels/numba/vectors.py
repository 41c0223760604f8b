"""Vectors of 16 numbers that are rounded to the dtype of an array: LLVM does not vectorize such a loop."""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mega_model.kernels.numba.vector_ir import (
    INTS,
    LANES,
    data_pointer,
    load_vector,
    offset_at,
    store_vector,
)

_HALVES = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def narrow(typing_context, values, first, vectors, out, start):
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
def add_narrow(typing_context, values, first, bias, bias_start, vectors, out, start):
    """As `narrow`, after adding bias[bias_start:], float32 or bfloat16."""

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
    int32 = ir.IntType(32)

    def integers(number: int) -> Any:
        return ir.Constant(INTS, [ir.Constant(int32, number)] * LANES)

    bits = builder.bitcast(values, INTS)
    is_odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.add(bits, builder.add(is_odd, integers(0x7FFF)))  # ties to even
    is_number = builder.fcmp_ordered("ord", values, values)
    number_bits = builder.select(is_number, rounded, integers(0x7FC00000))
    halves = builder.trunc(builder.lshr(number_bits, integers(16)), _HALVES)
    pointer = builder.bitcast(builder.gep(data, [place]), _HALVES.as_pointer())
    builder.store(halves, pointer).align = 2
