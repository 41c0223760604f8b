"""LLVM instructions on vectors of 16 float32 numbers, from which `simd` builds its intrinsics."""

# mypy: ignore-errors
# values of llvmlite have no types

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

LANES = 16
FLOAT = ir.FloatType()
INT = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)

_FEATURES = binding.get_host_cpu_features()  # for which numba compiles
HAS_BF16_PRODUCTS = bool(_FEATURES.get("avx512bf16"))
HAS_INT8_PRODUCTS = bool(_FEATURES.get("avx512vnni"))
HAS_AVX512 = bool(_FEATURES.get("avx512f"))
# vectors of sums that stay in registers, beside a row of weights and an input
SUM_VECTORS = 24 if HAS_AVX512 else 6

PREFETCH_BYTES = 12 * 1024  # of a packed weight, ahead of its product: past the panel's last lines

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375  # ln 2 in two parts, of which the first has few bits (Cody and Waite)
LN2_LOW = -2.12194440e-4
# e^r on |r| <= ln 2 / 2, smallest power last: the polynomial of Cephes' expf
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
EXP_MIN = -87.0


def compute_exp(builder: Any, x: Any) -> Any:
    """Compute e^x of a vector with x <= 0, to about one unit in the last place; 0 below EXP_MIN."""
    round_ = declare_function(builder, "llvm.rint.v16f32", VECTOR, VECTOR)
    small = builder.fcmp_ordered(">", x, constant(EXP_MIN))  # false for -inf and NaN
    is_number = builder.fcmp_ordered("ord", x, x)
    clipped = builder.select(small, x, constant(EXP_MIN))
    power = builder.call(round_, [builder.fmul(clipped, constant(LOG2_E))])
    rest = fma(builder, power, constant(-LN2_HIGH), clipped)
    rest = fma(builder, power, constant(-LN2_LOW), rest)
    polynomial = constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        polynomial = fma(builder, polynomial, rest, constant(term))
    value = fma(builder, builder.fmul(polynomial, rest), rest, builder.fadd(rest, constant(1.0)))
    exponent = builder.add(builder.fptosi(power, INTS), ir.Constant(INTS, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), VECTOR)
    result = builder.select(small, builder.fmul(value, scale), constant(0.0))
    return builder.select(is_number, result, x)  # NaN stays NaN


def add_lanes(builder: Any, x: Any) -> Any:
    """Add the 16 lanes in pairs: lanes 8 apart first, then 4, 2 and 1."""
    for distance in (8, 4, 2, 1):
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        order = ir.Constant(INTS, lanes)
        x = builder.fadd(x, builder.shuffle_vector(x, ir.Constant(VECTOR, ir.Undefined), order))
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def data_pointer(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def offset_at(builder: Any, start: Any, step: Any, number: int) -> Any:
    """Return start + step · number."""
    return builder.add(start, builder.mul(step, ir.Constant(INT, number)))


def load_vector(builder: Any, array_type: Any, data: Any, place: Any) -> Any:
    """Load 16 numbers as float32."""
    pointer = builder.gep(data, [place])
    if array_type.dtype == types.float32:
        loaded = builder.load(builder.bitcast(pointer, VECTOR.as_pointer()))
        loaded.align = 4
        return loaded
    loaded = builder.load(builder.bitcast(pointer, HALVES.as_pointer()))
    loaded.align = 2
    wide = builder.shl(builder.zext(loaded, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(wide, VECTOR)


def store_vector(builder: Any, data: Any, place: Any, values: Any) -> None:
    pointer = builder.bitcast(builder.gep(data, [place]), values.type.as_pointer())
    builder.store(values, pointer).align = 2 if values.type.element == ir.IntType(16) else 4


def bf16_bits(builder: Any, x: Any) -> Any:
    """Return the bits of the nearest bfloat16 of a float32 number or vector, ties to even."""
    is_vector = isinstance(x.type, ir.VectorType)
    words, halves = (INTS, HALVES) if is_vector else (INTS.element, HALVES.element)

    def integer(number: int) -> Any:
        return ir.Constant(words, [number] * LANES if is_vector else number)

    bits = builder.bitcast(x, words)
    is_odd = builder.and_(builder.lshr(bits, integer(16)), integer(1))
    rounded = builder.add(bits, builder.add(is_odd, integer(0x7FFF)))
    is_number = builder.fcmp_ordered("ord", x, x)
    number_bits = builder.select(is_number, rounded, integer(0x7FC00000))
    return builder.trunc(builder.lshr(number_bits, integer(16)), halves)


def splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def splat_int(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(INTS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(
        declare_function(builder, "llvm.fma.v16f32", VECTOR, VECTOR, VECTOR, VECTOR), [a, b, c]
    )


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def declare_function(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def group_vectors(rows: int, vectors: int) -> int:
    """Return how many vectors of a tile to compute at a time: all sums stay in registers."""
    fitting = max(1, SUM_VECTORS // rows)
    return max(count for count in range(1, vectors + 1) if vectors % count == 0 and count <= fitting)


def prefetch_line(builder: Any, pointer: Any, distance: int) -> None:
    """Start to load the cache line `distance` bytes after a pointer, which may be past the array's end."""
    int32 = ir.IntType(32)
    byte_pointer = ir.IntType(8).as_pointer()
    fetch = declare_function(builder, "llvm.prefetch.p0", ir.VoidType(), byte_pointer, int32, int32, int32)
    place = builder.gep(builder.bitcast(pointer, byte_pointer), [ir.Constant(INT, distance)])
    read_data_nearest = [ir.Constant(int32, value) for value in (0, 2, 1)]
    builder.call(fetch, [place, *read_data_nearest])
