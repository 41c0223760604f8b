"""Vectors of 16 numbers between arrays: conversions, sums and the logistic function, for loops over rows.

LLVM does not vectorize a loop that converts to bfloat16. Every element is computed alike in any lane.
"""

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
    VECTOR,
    compute_exp,
    constant,
    data_pointer,
    declare_function,
    load_vector,
    offset_at,
    store_vector,
)

_HALVES = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def widen(typing_context, x, start, vectors, out):
    """Set out[0:16 · vectors], float32, to x[start:], float32 or bfloat16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x_data, out_data = (data_pointer(context, builder, sig.args[i], args[i]) for i in (0, 3))
        with cgutils.for_range(builder, args[2]) as loop:
            place = offset_at(builder, ir.Constant(ir.IntType(64), 0), loop.index, LANES)
            values = load_vector(builder, sig.args[0], x_data, builder.add(args[1], place))
            store_vector(builder, out_data, place, values)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, out), generate


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


@intrinsic
def logistic(typing_context, x, vectors):
    """Replace 16 · `vectors` float32 numbers by 1 / (1 + e^-x)."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = data_pointer(context, builder, sig.args[0], args[0])
        magnitude = declare_function(builder, "llvm.fabs.v16f32", VECTOR, VECTOR)
        with cgutils.for_range(builder, args[1]) as loop:
            place = offset_at(builder, ir.Constant(ir.IntType(64), 0), loop.index, LANES)
            numbers = load_vector(builder, sig.args[0], data, place)
            small = compute_exp(builder, builder.fsub(constant(0.0), builder.call(magnitude, [numbers])))
            is_positive = builder.fcmp_ordered(">=", numbers, constant(0.0))
            numerator = builder.select(is_positive, constant(1.0), small)
            result = builder.fdiv(numerator, builder.fadd(constant(1.0), small))
            store_vector(builder, data, place, result)
        return context.get_dummy_value()

    return types.void(x, types.intp), generate


@intrinsic
def exponentials(typing_context, x, vectors):
    """Replace 16 · `vectors` float32 numbers of at most 0 by e^x."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = data_pointer(context, builder, sig.args[0], args[0])
        with cgutils.for_range(builder, args[1]) as loop:
            place = offset_at(builder, ir.Constant(ir.IntType(64), 0), loop.index, LANES)
            numbers = load_vector(builder, sig.args[0], data, place)
            store_vector(builder, data, place, compute_exp(builder, numbers))
        return context.get_dummy_value()

    return types.void(x, types.intp), generate


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
