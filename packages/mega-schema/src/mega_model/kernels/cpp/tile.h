// A tile of a product of bfloat16 matrices, in registers: sums[r][c] = sum over p of a[r][p] * b[p][c], where a and
// b hold pairs of numbers that follow each other along the sum, for VDPBF16PS multiplies pairs.

#pragma once

#include <cstdlib>
#include <memory>

#include "vectors.h"

using Pair = uint32_t;

struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};

// room for so many, in whole lines of the cache; null where there is none
template <typename Item>
std::unique_ptr<Item, Freed> room(long count) {
    return std::unique_ptr<Item, Freed>(
        static_cast<Item*>(std::aligned_alloc(64, (count * sizeof(Item) + 63) / 64 * 64 + 64)));
}

// 16 columns of two rows, each pair in one number; the second row may be absent
inline __m512i interleaved(const Bf16* a, const Bf16* b, long columns) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(columns), a));
    if (b == nullptr) return low;
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(columns), b));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// rows of a matrix as panel[pair of rows][WIDTH], zeros where there are no more columns
template <long WIDTH>
void pack(Pair* panel, const Bf16* from, long stride, long rows, long columns) {
    for (long r = 0; r < rows; r += 2, panel += WIDTH) {
        const Bf16* a = from + r * stride;
        const Bf16* b = r + 1 < rows ? a + stride : nullptr;
        for (long c = 0; c < WIDTH; c += 16)
            _mm512_store_si512(panel + c, interleaved(a + c, b == nullptr ? b : b + c, columns - c));
    }
}

// a[r][p] lies at a + r * row_step + p * pair_step; b in a panel of its own
template <long ROWS, long VECTORS>
[[gnu::always_inline]] inline void multiply(__m512 (&sums)[ROWS][VECTORS], const Pair* a, long row_step, long pair_step, const Pair* b, long pairs) {
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    for (long p = 0; p < pairs; ++p, a += pair_step, b += 16 * VECTORS) {
        __m512bh some[VECTORS];
#pragma GCC unroll 4
        for (long v = 0; v < VECTORS; ++v) some[v] = (__m512bh)_mm512_load_si512(b + 16 * v);
#pragma GCC unroll 8
        for (long r = 0; r < ROWS; ++r) {
            const __m512bh one = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * row_step]));
#pragma GCC unroll 4
            for (long v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], one, some[v]);
        }
    }
}
