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

LANES = 16

_CACHE_LINE = 64  # bytes

_FLOAT = ir.FloatType()
_INT = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # ln 2 in two parts, of which the first has few bits (Cody and Waite)
_LN2_LOW = -2.12194440e-4
# e^r on |r| <= ln 2 / 2, smallest power last: the polynomial of Cephes' expf
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_MIN = -87.0  # below: 0
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

    @intrinsic
    def tile_product(
        typing_context, a, a_start, a_row, b, b_start, b_row, b_vector, count, c, c_start, c_row
    ):
        size = types.intp
        start = b_start if scattered else size
        signature = types.void(a, size, size, b, start, size, size, size, c, size, size)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            types_ = sig.args
            a_data, b_data, c_data = (_data(context, builder, types_[i], args[i]) for i in (0, 3, 8))
            places = [
                builder.add(_offset(builder, args[9], args[10], r), ir.Constant(_INT, LANES * v))
                for r in range(rows)
                for v in range(vectors)
            ]
            if scattered:
                starts = _data(context, builder, types_[4], args[4])
                index = [builder.add(args[6], ir.Constant(_INT, v)) for v in range(vectors)]
                bases = [builder.load(builder.gep(starts, [i])) for i in index]
            else:
                bases = [_offset(builder, args[4], args[6], v) for v in range(vectors)]
            sums = [
                cgutils.alloca_once_value(
                    builder, _load_vector(builder, types_[8], c_data, place) if accumulate else _constant(0.0)
                )
                for place in places
            ]
            with cgutils.for_range(builder, args[7]) as loop:
                step = builder.mul(loop.index, args[5])
                columns = [
                    _load_vector(builder, types_[3], b_data, builder.add(base, step)) for base in bases
                ]
                for r in range(rows):
                    place = builder.add(_offset(builder, args[1], args[2], r), loop.index)
                    factor = _splat(builder, builder.load(builder.gep(a_data, [place])))
                    for column, total in zip(columns, sums[r * vectors : (r + 1) * vectors], strict=True):
                        builder.store(_fma(builder, factor, column, builder.load(total)), total)
            for total, place in zip(sums, places, strict=True):
                _store_vector(builder, c_data, place, builder.load(total))
            return context.get_dummy_value()

        return signature, generate

    return tile_product


@intrinsic
def vector_max(typing_context, x, start, vectors):
    """Return the largest of 16 · `vectors` float32 numbers from x[start]."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, count = args
        data = _data(context, builder, sig.args[0], array)
        largest = cgutils.alloca_once_value(builder, _constant(-float("inf")))
        maximum = _declare(builder, "llvm.maxnum.v16f32", _VECTOR, _VECTOR, _VECTOR)
        with cgutils.for_range(builder, count) as loop:
            values = _load_vector(builder, sig.args[0], data, _offset(builder, first, loop.index, LANES))
            builder.store(builder.call(maximum, [builder.load(largest), values]), largest)
        reduce = _declare(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, _VECTOR)
        return builder.call(reduce, [builder.load(largest)])

    return types.float32(x, types.intp, types.intp), generate


@intrinsic
def exp_sum(typing_context, x, start, vectors, shift):
    """Replace 16 · `vectors` float32 numbers by e^(x - shift), 0 for -inf, and return their sum.

    Lane j sums the numbers 16 i + j in the order of i; then the lanes are added in pairs.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, count, largest = args
        data = _data(context, builder, sig.args[0], array)
        total = cgutils.alloca_once_value(builder, _constant(0.0))
        shift_vector = _splat(builder, largest)
        with cgutils.for_range(builder, count) as loop:
            place = _offset(builder, first, loop.index, LANES)
            values = _load_vector(builder, sig.args[0], data, place)
            powers = _exp(builder, builder.fsub(values, shift_vector))
            _store_vector(builder, data, place, powers)
            builder.store(builder.fadd(builder.load(total), powers), total)
        return _add_lanes(builder, builder.load(total))

    return types.float32(x, types.intp, types.intp, types.float32), generate


@intrinsic
def prefetch(typing_context, x, start, count):
    """Start to load the cache lines of `count` elements from x[start], which may be past the array's end."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = _data(context, builder, sig.args[0], args[0])
        int32 = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        fetch = _declare(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, int32, int32, int32)
        line = _CACHE_LINE // (sig.args[0].dtype.bitwidth // 8)
        lines = builder.udiv(args[2], ir.Constant(_INT, line))
        read_data_nearest = [ir.Constant(int32, value) for value in (0, 2, 1)]
        with cgutils.for_range(builder, lines) as loop:
            place = builder.gep(data, [_offset(builder, args[1], loop.index, line)])
            builder.call(fetch, [builder.bitcast(place, pointer), *read_data_nearest])
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp), generate


@intrinsic
def bf16_to_float(typing_context, bits):
    """Return the float32 number of bfloat16's bits; a float32 number passes through."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0] == types.float32:
            return args[0]
        wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, _FLOAT)

    return types.float32(bits), generate


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def build_bf16_panel(rows: int, vectors: int) -> Callable[..., None]:
    """Build an intrinsic that multiplies pairs of bfloat16 numbers: c[r] = Σ_p x[r, p] · w[p].

    It uses AVX-512's VDPBF16PS, and adds the pairs in the order of p, as oneDNN does. It is called with (x,
    x_start, x_row, w, w_start, pairs, c): x holds pairs as uint32; w is uint16, of which pair p is 16 ·
    `vectors` pairs of numbers; c is float32, (rows, 16 · vectors), contiguous.
    """
    pair_type = ir.VectorType(_BFloat(), 2 * LANES)

    @intrinsic
    def bf16_panel(typing_context, x, x_start, x_row, w, w_start, pairs, c):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_data, w_data, c_data = (_data(context, builder, sig.args[i], args[i]) for i in (0, 3, 6))
            dot = _declare(
                builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, _VECTOR, pair_type, pair_type
            )
            sums = [cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(rows * vectors)]
            with cgutils.for_range(builder, args[5]) as loop:
                first = _offset(builder, args[4], loop.index, 2 * LANES * vectors)
                columns = []
                for v in range(vectors):
                    place = builder.gep(w_data, [builder.add(first, ir.Constant(_INT, 2 * LANES * v))])
                    column = builder.load(builder.bitcast(place, pair_type.as_pointer()))
                    column.align = 2
                    columns.append(column)
                for r in range(rows):
                    place = builder.add(_offset(builder, args[1], args[2], r), loop.index)
                    pair = builder.load(builder.gep(x_data, [place]))
                    factor = builder.bitcast(_splat_int(builder, pair), pair_type)
                    for v, column in enumerate(columns):
                        total = sums[r * vectors + v]
                        builder.store(builder.call(dot, [builder.load(total), factor, column]), total)
            for number, total in enumerate(sums):
                _store_vector(builder, c_data, ir.Constant(_INT, LANES * number), builder.load(total))
            return context.get_dummy_value()

        size = types.intp
        return types.void(x, size, size, w, size, size, c), generate

    return bf16_panel


@intrinsic
def round_like(typing_context, array, x):
    """Return a float32 number as an element of `array`: itself, or the bits of the nearest bfloat16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0].dtype == types.float32:
            return args[1]
        int32 = ir.IntType(32)
        bits = builder.bitcast(args[1], int32)
        is_odd = builder.and_(builder.lshr(bits, ir.Constant(int32, 16)), ir.Constant(int32, 1))
        rounded = builder.add(bits, builder.add(is_odd, ir.Constant(int32, 0x7FFF)))  # ties to even
        is_number = builder.fcmp_ordered("ord", args[1], args[1])
        number_bits = builder.select(is_number, rounded, ir.Constant(int32, 0x7FC00000))
        return builder.trunc(builder.lshr(number_bits, ir.Constant(int32, 16)), ir.IntType(16))

    return array.dtype(array, types.float32), generate


def build_activation(name: str) -> Callable[..., None]:
    """Build an intrinsic that applies an activation in place to 16 · `vectors` float32 numbers from x[start].

    Args:
        name: "gelu_tanh", "gelu_erf" or "silu".
    """
    compute = {"gelu_tanh": _gelu_tanh, "gelu_erf": _gelu_erf, "silu": _silu}[name]

    @intrinsic
    def activation(typing_context, x, start, vectors):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            data = _data(context, builder, sig.args[0], args[0])
            with cgutils.for_range(builder, args[2]) as loop:
                place = _offset(builder, args[1], loop.index, LANES)
                values = _load_vector(builder, sig.args[0], data, place)
                _store_vector(builder, data, place, compute(builder, values))
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp), generate

    return activation


def _silu(builder: Any, x: Any) -> Any:
    return builder.fmul(x, _sigmoid(builder, x))


def _gelu_tanh(builder: Any, x: Any) -> Any:
    """Compute x (1 + tanh z) / 2 = x sigmoid(2 z)."""
    cubic = _fma(builder, builder.fmul(x, x), _constant(2 * _SQRT_2_PI * 0.044715), _constant(2 * _SQRT_2_PI))
    return builder.fmul(x, _sigmoid(builder, builder.fmul(x, cubic)))


def _gelu_erf(builder: Any, x: Any) -> Any:
    """Compute x Φ(x), with the complement of erf of |x| / √2 as a polynomial times e^(-x²/2)."""
    magnitude = builder.fmul(_magnitude(builder, x), _constant(0.5**0.5))
    t = builder.fdiv(_constant(1.0), _fma(builder, magnitude, _constant(_ERFC_SCALE), _constant(1.0)))
    polynomial = _constant(_ERFC_TERMS[0])
    for term in _ERFC_TERMS[1:]:
        polynomial = _fma(builder, polynomial, t, _constant(term))
    square = builder.fmul(builder.fmul(magnitude, magnitude), _constant(-1.0))
    tail = builder.fmul(builder.fmul(polynomial, t), builder.fmul(_exp(builder, square), _constant(0.5)))
    is_negative = builder.fcmp_ordered("<", x, _constant(0.0))
    return builder.fmul(x, builder.select(is_negative, tail, builder.fsub(_constant(1.0), tail)))


def _sigmoid(builder: Any, x: Any) -> Any:
    """Compute 1 / (1 + e^-x) from e^-|x|, which does not overflow."""
    power = _exp(builder, builder.fmul(_magnitude(builder, x), _constant(-1.0)))
    is_negative = builder.fcmp_ordered("<", x, _constant(0.0))
    numerator = builder.select(is_negative, power, _constant(1.0))
    return builder.fdiv(numerator, builder.fadd(_constant(1.0), power))


def _magnitude(builder: Any, x: Any) -> Any:
    return builder.call(_declare(builder, "llvm.fabs.v16f32", _VECTOR, _VECTOR), [x])


def _exp(builder: Any, x: Any) -> Any:
    """Compute e^x of a vector with x <= 0, to about one unit in the last place; 0 below _EXP_MIN."""
    round_ = _declare(builder, "llvm.rint.v16f32", _VECTOR, _VECTOR)
    small = builder.fcmp_ordered(">", x, _constant(_EXP_MIN))  # false for -inf and NaN
    is_number = builder.fcmp_ordered("ord", x, x)
    clipped = builder.select(small, x, _constant(_EXP_MIN))
    power = builder.call(round_, [builder.fmul(clipped, _constant(_LOG2_E))])
    rest = _fma(builder, power, _constant(-_LN2_HIGH), clipped)
    rest = _fma(builder, power, _constant(-_LN2_LOW), rest)
    polynomial = _constant(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        polynomial = _fma(builder, polynomial, rest, _constant(term))
    value = _fma(builder, builder.fmul(polynomial, rest), rest, builder.fadd(rest, _constant(1.0)))
    exponent = builder.add(builder.fptosi(power, _INTS), ir.Constant(_INTS, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _VECTOR)
    result = builder.select(small, builder.fmul(value, scale), _constant(0.0))
    return builder.select(is_number, result, x)  # NaN stays NaN


def _add_lanes(builder: Any, x: Any) -> Any:
    """Add the 16 lanes in pairs: lanes 8 apart first, then 4, 2 and 1."""
    for distance in (8, 4, 2, 1):
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        order = ir.Constant(_INTS, lanes)
        x = builder.fadd(x, builder.shuffle_vector(x, ir.Constant(_VECTOR, ir.Undefined), order))
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _offset(builder: Any, start: Any, step: Any, number: int) -> Any:
    """Return start + step · number."""
    return builder.add(start, builder.mul(step, ir.Constant(_INT, number)))


def _load_vector(builder: Any, array_type: Any, data: Any, place: Any) -> Any:
    """Load 16 numbers as float32."""
    pointer = builder.gep(data, [place])
    if array_type.dtype == types.float32:
        loaded = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
        loaded.align = 4
        return loaded
    halves = ir.VectorType(ir.IntType(16), LANES)
    loaded = builder.load(builder.bitcast(pointer, halves.as_pointer()))
    loaded.align = 2
    wide = builder.shl(builder.zext(loaded, _INTS), ir.Constant(_INTS, [16] * LANES))
    return builder.bitcast(wide, _VECTOR)


def _store_vector(builder: Any, data: Any, place: Any, values: Any) -> None:
    pointer = builder.bitcast(builder.gep(data, [place]), _VECTOR.as_pointer())
    builder.store(values, pointer).align = 4


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _splat_int(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_INTS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(_declare(builder, "llvm.fma.v16f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR), [a, b, c])


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _declare(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
