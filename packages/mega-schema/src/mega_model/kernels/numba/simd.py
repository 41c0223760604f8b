"""Vector instructions for numba kernels: products of small tiles, and the softmax of a row of scores.

numba vectorizes loops, but keeps no tile of sums in registers. These intrinsics write LLVM vectors of 16
float32 numbers, which LLVM maps to whatever vectors the CPU has. Every sum has a fixed order that depends on
neither the number of rows nor the number of vectors of a tile, so a row's result is bitwise the same in any
tile. Arrays are float32, or uint16 with the bits of bfloat16.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mega_model.kernels.numba.vector_ir import (
    FLOAT,
    INT,
    LANES,
    VECTOR,
    add_lanes,
    bf16_bits,
    compute_exp,
    constant,
    data_pointer,
    declare_function,
    fma,
    group_vectors,
    load_vector,
    offset_at,
    prefetch_line,
    splat,
    store_vector,
)

_CACHE_LINE = 64  # bytes
_SQRT_2_PI = 0.7978845608028654  # √(2 / π)
# erfc(x) = polynomial(t) t e^(-x²) with t = 1 / (1 + scale x), to 1.5e-7: Abramowitz and Stegun, 7.1.26
_ERFC_SCALE = 0.3275911
_ERFC_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def build_tile_product(
    rows: int, vectors: int, *, scattered: bool = False, accumulate: bool = True
) -> Callable[..., None]:
    """Build an intrinsic that computes a product of small matrices: c[r] = Σ_i a[r, i] · b[i].

    The intrinsic is called with (a, a_start, a_row, b, b_start, b_row, b_vector, count, c, c_start, c_row):
    arrays, and for each the first element and its steps, in elements. c has 16 · `vectors` columns; vector v
    of row i of b begins at b_start + i · b_row + v · b_vector. A sum adds its products in the order of i,
    with one rounding each (FMA).

    Args:
        scattered: b_start is an array, and vector v of row i begins at b_start[b_vector + v] + i · b_row.
        accumulate: add to what c holds.
    """
    step = group_vectors(rows, vectors)

    @intrinsic
    def tile_product(
        typing_context, a, a_start, a_row, b, b_start, b_row, b_vector, count, c, c_start, c_row
    ):
        size = types.intp
        start = b_start if scattered else size
        signature = types.void(a, size, size, b, start, size, size, size, c, size, size)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            types_ = sig.args
            a_data, b_data, c_data = (data_pointer(context, builder, types_[i], args[i]) for i in (0, 3, 8))
            if scattered:
                starts = data_pointer(context, builder, types_[4], args[4])
                index = [builder.add(args[6], ir.Constant(INT, v)) for v in range(vectors)]
                bases = [builder.load(builder.gep(starts, [i])) for i in index]
            else:
                bases = [offset_at(builder, args[4], args[6], v) for v in range(vectors)]
            end = builder.add(bases[0], builder.mul(args[7], args[5]))
            for first in range(0, vectors, step):
                columns = range(first, first + step)
                places = [
                    builder.add(offset_at(builder, args[9], args[10], r), ir.Constant(INT, LANES * v))
                    for r in range(rows)
                    for v in columns
                ]
                sums = [
                    cgutils.alloca_once_value(
                        builder,
                        load_vector(builder, types_[8], c_data, place) if accumulate else constant(0.0),
                    )
                    for place in places
                ]
                with cgutils.for_range(builder, args[7]) as loop:
                    row = builder.mul(loop.index, args[5])
                    b_places = [builder.add(bases[v], row) for v in columns]
                    b_vectors = [load_vector(builder, types_[3], b_data, place) for place in b_places]
                    if step < vectors and not scattered:  # rows of a few columns, which no processor foresees
                        for v in columns:
                            line = builder.add(builder.mul(args[7], ir.Constant(INT, v)), loop.index)
                            place = builder.add(end, offset_at(builder, ir.Constant(INT, 0), line, LANES))
                            prefetch_line(builder, builder.gep(b_data, [place]), 0)
                    for r in range(rows):
                        place = builder.add(offset_at(builder, args[1], args[2], r), loop.index)
                        factor = splat(builder, builder.load(builder.gep(a_data, [place])))
                        for b_vector, total in zip(b_vectors, sums[r * step : (r + 1) * step], strict=True):
                            builder.store(fma(builder, factor, b_vector, builder.load(total)), total)
                for total, place in zip(sums, places, strict=True):
                    store_vector(builder, c_data, place, builder.load(total))
            return context.get_dummy_value()

        return signature, generate

    return tile_product


@intrinsic
def vector_max(typing_context, x, start, vectors):
    """Return the largest of 16 · `vectors` float32 numbers from x[start]."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, count = args
        data = data_pointer(context, builder, sig.args[0], array)
        largest = cgutils.alloca_once_value(builder, constant(-float("inf")))
        maximum = declare_function(builder, "llvm.maxnum.v16f32", VECTOR, VECTOR, VECTOR)
        with cgutils.for_range(builder, count) as loop:
            values = load_vector(builder, sig.args[0], data, offset_at(builder, first, loop.index, LANES))
            builder.store(builder.call(maximum, [builder.load(largest), values]), largest)
        reduce = declare_function(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, VECTOR)
        return builder.call(reduce, [builder.load(largest)])

    return types.float32(x, types.intp, types.intp), generate


@intrinsic
def exp_sum(typing_context, x, start, vectors, shift):
    """Replace 16 · `vectors` float32 numbers by e^(x - shift), 0 for -inf, and return their sum.

    Lane j sums the numbers 16 i + j in the order of i; then the lanes are added in pairs.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, count, largest = args
        data = data_pointer(context, builder, sig.args[0], array)
        total = cgutils.alloca_once_value(builder, constant(0.0))
        shift_vector = splat(builder, largest)
        with cgutils.for_range(builder, count) as loop:
            place = offset_at(builder, first, loop.index, LANES)
            values = load_vector(builder, sig.args[0], data, place)
            powers = compute_exp(builder, builder.fsub(values, shift_vector))
            store_vector(builder, data, place, powers)
            builder.store(builder.fadd(builder.load(total), powers), total)
        return add_lanes(builder, builder.load(total))

    return types.float32(x, types.intp, types.intp, types.float32), generate


@intrinsic
def sum_squares(typing_context, x, start, vectors):
    """Return the sum of squares of 16 · `vectors` float32 numbers from x[start], added as in `exp_sum`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = data_pointer(context, builder, sig.args[0], args[0])
        total = cgutils.alloca_once_value(builder, constant(0.0))
        with cgutils.for_range(builder, args[2]) as loop:
            values = load_vector(builder, sig.args[0], data, offset_at(builder, args[1], loop.index, LANES))
            builder.store(fma(builder, values, values, builder.load(total)), total)
        return add_lanes(builder, builder.load(total))

    return types.float32(x, types.intp, types.intp), generate


@intrinsic
def prefetch(typing_context, x, start, count):
    """Start to load the cache lines of `count` elements from x[start], which may be past the array's end."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = data_pointer(context, builder, sig.args[0], args[0])
        int32 = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        fetch = declare_function(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, int32, int32, int32)
        line = _CACHE_LINE // (sig.args[0].dtype.bitwidth // 8)
        lines = builder.udiv(args[2], ir.Constant(INT, line))
        read_data_nearest = [ir.Constant(int32, value) for value in (0, 2, 1)]
        with cgutils.for_range(builder, lines) as loop:
            place = builder.gep(data, [offset_at(builder, args[1], loop.index, line)])
            builder.call(fetch, [builder.bitcast(place, pointer), *read_data_nearest])
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp), generate


@intrinsic
def bf16_to_float(typing_context, bits):
    """Return the float32 number of bfloat16's bits; a float32 number passes through."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if sig.args[0] == types.float32 else _widen(builder, args[0])

    return types.float32(bits), generate


@intrinsic
def round_like(typing_context, array, x):
    """Return a float32 number as an element of `array`: itself, or the bits of the nearest bfloat16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[1] if sig.args[0].dtype == types.float32 else bf16_bits(builder, args[1])

    return array.dtype(array, types.float32), generate


@intrinsic
def convert_like(typing_context, array, x):
    """Return a float32 number, or bfloat16's bits, as an element of `array`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[1] == sig.args[0].dtype:
            return args[1]
        if sig.args[0].dtype == types.float32:
            return _widen(builder, args[1])
        return bf16_bits(builder, args[1])

    return array.dtype(array, x), generate


@intrinsic
def scale_row(typing_context, x, x_start, out, out_start, count, factor):
    """Set out[out_start + i] to factor · x[x_start + i], for `count` elements.

    LLVM uses no vectors for a loop over a slice, whose elements may lie apart for all it knows.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x_type, _, out_type, *_ = sig.args
        x_data, out_data = (data_pointer(context, builder, sig.args[i], args[i]) for i in (0, 2))
        is_float = out_type.dtype == types.float32
        lanes = ir.Constant(INT, LANES)
        vectors = builder.sdiv(args[4], lanes)
        scale = splat(builder, args[5])
        with cgutils.for_range(builder, vectors) as loop:
            values = load_vector(builder, x_type, x_data, offset_at(builder, args[1], loop.index, LANES))
            product = builder.fmul(values, scale)
            place = offset_at(builder, args[3], loop.index, LANES)
            store_vector(builder, out_data, place, product if is_float else bf16_bits(builder, product))
        vector_end = builder.mul(vectors, lanes)
        with cgutils.for_range(builder, builder.sub(args[4], vector_end)) as loop:
            index = builder.add(vector_end, loop.index)
            value = builder.load(builder.gep(x_data, [builder.add(args[1], index)]))
            product = builder.fmul(
                value if x_type.dtype == types.float32 else _widen(builder, value), args[5]
            )
            pointer = builder.gep(out_data, [builder.add(args[3], index)])
            builder.store(product if is_float else bf16_bits(builder, product), pointer)
        return context.get_dummy_value()

    size = types.intp
    return types.void(x, size, out, size, size, types.float32), generate


def build_activation(name: str) -> Callable[..., None]:
    """Build an intrinsic that applies an activation in place to 16 · `vectors` float32 numbers from x[start].

    Args:
        name: "gelu_tanh", "gelu_erf" or "silu".
    """
    compute = {"gelu_tanh": _gelu_tanh, "gelu_erf": _gelu_erf, "silu": _silu}[name]

    @intrinsic
    def activation(typing_context, x, start, vectors):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            data = data_pointer(context, builder, sig.args[0], args[0])
            with cgutils.for_range(builder, args[2]) as loop:
                place = offset_at(builder, args[1], loop.index, LANES)
                values = load_vector(builder, sig.args[0], data, place)
                store_vector(builder, data, place, compute(builder, values))
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp), generate

    return activation


def _widen(builder: Any, bits: Any) -> Any:
    """Return the float32 number of bfloat16's bits."""
    wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    return builder.bitcast(wide, FLOAT)


def _silu(builder: Any, x: Any) -> Any:
    return builder.fmul(x, _sigmoid(builder, x))


def _gelu_tanh(builder: Any, x: Any) -> Any:
    """Compute x (1 + tanh z) / 2 = x sigmoid(2 z)."""
    cubic = fma(builder, builder.fmul(x, x), constant(2 * _SQRT_2_PI * 0.044715), constant(2 * _SQRT_2_PI))
    return builder.fmul(x, _sigmoid(builder, builder.fmul(x, cubic)))


def _gelu_erf(builder: Any, x: Any) -> Any:
    """Compute x Φ(x), with the complement of erf of |x| / √2 as a polynomial times e^(-x²/2)."""
    magnitude = builder.fmul(_magnitude(builder, x), constant(0.5**0.5))
    t = builder.fdiv(constant(1.0), fma(builder, magnitude, constant(_ERFC_SCALE), constant(1.0)))
    polynomial = constant(_ERFC_TERMS[0])
    for term in _ERFC_TERMS[1:]:
        polynomial = fma(builder, polynomial, t, constant(term))
    square = builder.fmul(builder.fmul(magnitude, magnitude), constant(-1.0))
    tail = builder.fmul(
        builder.fmul(polynomial, t), builder.fmul(compute_exp(builder, square), constant(0.5))
    )
    is_negative = builder.fcmp_ordered("<", x, constant(0.0))
    return builder.fmul(x, builder.select(is_negative, tail, builder.fsub(constant(1.0), tail)))


def _sigmoid(builder: Any, x: Any) -> Any:
    """Compute 1 / (1 + e^-x) from e^-|x|, which does not overflow."""
    power = compute_exp(builder, builder.fmul(_magnitude(builder, x), constant(-1.0)))
    is_negative = builder.fcmp_ordered("<", x, constant(0.0))
    numerator = builder.select(is_negative, power, constant(1.0))
    return builder.fdiv(numerator, builder.fadd(constant(1.0), power))


def _magnitude(builder: Any, x: Any) -> Any:
    return builder.call(declare_function(builder, "llvm.fabs.v16f32", VECTOR, VECTOR), [x])
