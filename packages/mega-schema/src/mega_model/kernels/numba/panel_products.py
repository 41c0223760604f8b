"""Vector instructions for products with packed weights of bfloat16 or 8-bit integers.

As in `simd`, a sum has an order that depends on neither the number of rows nor the number of vectors.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mega_model.kernels.numba.vector_ir import (
    HAS_BF16_PRODUCTS,
    HAS_INT8_PRODUCTS,
    INT,
    INTS,
    LANES,
    PREFETCH_BYTES,
    VECTOR,
    data_pointer,
    declare_function,
    fma,
    group_vectors,
    offset_at,
    prefetch_line,
    splat_int,
    store_vector,
)

_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_PAIRS = ir.VectorType(ir.IntType(32), 2 * LANES)
_LLVM_OF_BYTES = 22  # from which VPDPBUSD takes vectors of bytes


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

    It adds the pairs in the order of p, as oneDNN does, by AVX-512's VDPBF16PS; a CPU without it widens both
    to float32 and adds the first product of a pair, then the second, by FMA. It is called with (x, x_start,
    x_row, w, w_start, pairs, c): x holds pairs as uint32; w is uint16, of which pair p is 16 · `vectors`
    pairs of numbers; c is float32, (rows, 16 · vectors), contiguous.
    """
    if not HAS_BF16_PRODUCTS:
        return _build_panel(rows, vectors, _add_widened_pair, VECTOR, INTS, 2)
    operand = ir.VectorType(_BFloat(), 2 * LANES)
    return _build_panel(rows, vectors, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, operand, 2)


def _add_widened_pair(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """Return total + x · w of vectors of pairs, of which the first is in the low half of each integer."""
    for widen in (_widen_low, _widen_high):
        total = fma(builder, widen(builder, x), widen(builder, w), total)
    return total


def _widen_low(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(pairs, ir.Constant(INTS, [16] * LANES)), VECTOR)


def _widen_high(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * LANES)), VECTOR)


def build_int8_panel(rows: int, vectors: int) -> Callable[..., None]:
    """Build an intrinsic that multiplies fours of integers: c[r] = Σ_p x[r, p] · w[p], exactly.

    It uses AVX-512's VPDPBUSD; a CPU without it multiplies 16-bit integers, and adds in 32 bits. It is called
    as that of `build_bf16_panel`: x holds fours of uint8 as uint32; w is int8, of which four p is
    16 · `vectors` fours of numbers; c is int32.
    """
    if not HAS_INT8_PRODUCTS:
        return _build_panel(rows, vectors, _add_widened_four, INTS, INTS, 4)
    operand = ir.VectorType(ir.IntType(8), 4 * LANES) if llvm_version_info[0] >= _LLVM_OF_BYTES else INTS
    return _build_panel(rows, vectors, "llvm.x86.avx512.vpdpbusd.512", INTS, operand, 4)


def _add_widened_four(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """Return total + x · w of vectors of fours, unsigned in x and signed in w.

    LLVM makes x86's VPMADDWD of the product and sum of a pair. VPMADDUBSW, which takes bytes, would round
    sums that 16 bits do not hold.
    """
    for number in range(2):  # bytes 0 and 2, then 1 and 3
        shift = ir.Constant(INTS, [8 * number] * LANES)
        low_bytes = ir.Constant(INTS, [0x00FF00FF] * LANES)
        x_pairs = builder.bitcast(builder.and_(builder.lshr(x, shift), low_bytes), _SHORTS)
        w_pairs = builder.bitcast(w, _SHORTS)
        byte = ir.Constant(_SHORTS, [8] * 2 * LANES)
        if number == 0:
            w_pairs = builder.shl(w_pairs, byte)
        w_pairs = builder.ashr(w_pairs, byte)
        product = builder.mul(builder.sext(x_pairs, _PAIRS), builder.sext(w_pairs, _PAIRS))
        for half in range(2):
            lanes = ir.Constant(INTS, [2 * lane + half for lane in range(LANES)])
            part = builder.shuffle_vector(product, ir.Constant(_PAIRS, ir.Undefined), lanes)
            total = builder.add(total, part)
    return total


def _build_panel(
    rows: int,
    vectors: int,
    instruction: str | Callable[..., Any],
    total_type: Any,
    operand: Any,
    numbers: int,
) -> Callable[..., None]:
    """Build an intrinsic on an operation that adds products of `numbers` adjacent numbers to each lane.

    Args:
        instruction: the name of LLVM's, or a function that writes it.
    """
    step = group_vectors(rows, vectors)

    @intrinsic
    def panel_product(typing_context, x, x_start, x_row, w, w_start, groups, c):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_data, w_data, c_data = (data_pointer(context, builder, sig.args[i], args[i]) for i in (0, 3, 6))

            def add_product(*operands: Any) -> Any:
                if callable(instruction):
                    return instruction(builder, *operands)
                dot = declare_function(builder, instruction, total_type, total_type, operand, operand)
                return builder.call(dot, operands)

            end = offset_at(builder, args[4], args[5], numbers * LANES * vectors)
            zero = ir.Constant(total_type, [0] * LANES)
            for begin in range(0, vectors, step):
                sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * step)]
                with cgutils.for_range(builder, args[5]) as loop:
                    first = offset_at(builder, args[4], loop.index, numbers * LANES * vectors)
                    columns = []
                    for v in range(begin, begin + step):
                        place = builder.add(first, ir.Constant(INT, numbers * LANES * v))
                        pointer = builder.gep(w_data, [place])
                        column = builder.load(builder.bitcast(pointer, operand.as_pointer()))
                        column.align = 2
                        columns.append(column)
                        if step == vectors:
                            prefetch_line(builder, pointer, PREFETCH_BYTES)
                        else:  # of the next panel, whose rows are then read in parts
                            line = builder.add(builder.mul(args[5], ir.Constant(INT, v)), loop.index)
                            ahead = offset_at(builder, end, line, numbers * LANES)
                            prefetch_line(builder, builder.gep(w_data, [ahead]), 0)
                    for r in range(rows):
                        place = builder.add(offset_at(builder, args[1], args[2], r), loop.index)
                        group = builder.load(builder.gep(x_data, [place]))
                        factor = builder.bitcast(splat_int(builder, group), operand)
                        for v, column in enumerate(columns):
                            total = sums[r * step + v]
                            builder.store(add_product(builder.load(total), factor, column), total)
                for number, total in enumerate(sums):
                    r, v = divmod(number, step)
                    place = ir.Constant(INT, LANES * (r * vectors + begin + v))
                    store_vector(builder, c_data, place, builder.load(total))
            return context.get_dummy_value()

        size = types.intp
        return types.void(x, size, size, w, size, size, c), generate

    return panel_product
