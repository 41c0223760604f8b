// A tile of a matrix product in registers: sums[r][c] = sum over p of a[r][p] * b[p][c]. a and b hold words of 32
// bits: a float32 number, or a pair of bfloat16 numbers that are consecutive along the sum, because VDPBF16PS
// multiplies pairs.

#pragma once

#include "memory.h"
#include "vectors.h"

template <typename Item>
struct Words;

template <>
struct Words<Bf16> {
    using Word = uint32_t;
    static constexpr long PER = 2;  // numbers in a word
};

template <>
struct Words<float> {
    using Word = float;
    static constexpr long PER = 1;
};

using Pair = Words<Bf16>::Word;

// interleave 16 columns of two rows, a pair per 32-bit word; the second row may be null, for zeros
inline __m512i interleaved(const Bf16* a, const Bf16* b, long columns) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(columns), a));
    if (b == nullptr) return low;
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(columns), b));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// pack rows of a matrix as panel[pair of rows][WIDTH], with zeros for missing columns
template <long WIDTH>
void pack(Pair* panel, const Bf16* from, long stride, long rows, long columns) {
    for (long r = 0; r < rows; r += 2, panel += WIDTH) {
        const Bf16* a = from + r * stride;
        const Bf16* b = r + 1 < rows ? a + stride : nullptr;
        for (long c = 0; c < WIDTH; c += 16)
            _mm512_store_si512(panel + c, interleaved(a + c, b == nullptr ? b : b + c, columns - c));
    }
}

template <long WIDTH>
void pack(float* panel, const float* from, long stride, long rows, long columns) {
    for (long r = 0; r < rows; ++r, panel += WIDTH)
        for (long c = 0; c < WIDTH; c += 16)
            _mm512_store_ps(panel + c, load(from + r * stride + c, lanes(columns - c)));
}

// load the next 16 words of up to 16 lines, transposed: one vector per word, across the lines
template <typename Item>
void load_across(__m512 (&v)[16], const Item* from, long stride, long lines, long words) {
    for (long r = 0; r < 16; ++r)
        v[r] = r < lines ? _mm512_maskz_loadu_ps(lanes(words), from + r * stride) : _mm512_setzero_ps();
    transpose(v);
}

// pack the transpose of a matrix as panel[word of a row][WIDTH], with zeros for missing rows
template <long WIDTH, typename Item, typename Word = typename Words<Item>::Word>
void pack_transposed(Word* panel, const Item* from, long stride, long rows, long words) {
    for (long r = 0; r < WIDTH; r += 16)
        for (long p = 0; p < words; p += 16) {
            __m512 some[16];
            load_across(some, from + r * stride + Words<Item>::PER * p, stride, rows - r, words - p);
            for (long i = 0; i < std::min(16L, words - p); ++i) _mm512_store_ps(panel + (p + i) * WIDTH + r, some[i]);
        }
}

inline __m512 add_products(__m512 sum, Pair a, const Pair* b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)_mm512_load_si512(b));
}

inline __m512 add_products(__m512 sum, float a, const float* b) {
    return _mm512_fmadd_ps(_mm512_set1_ps(a), _mm512_load_ps(b), sum);
}

// a[r][p] is at a + r * row_step + p * word_step; b is a packed panel
template <long ROWS, long VECTORS, typename Word>
[[gnu::always_inline]] inline void multiply(__m512 (&sums)[ROWS][VECTORS], const Word* a, long row_step, long word_step,
                                            const Word* b, long words) {
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    for (long p = 0; p < words; ++p, a += word_step, b += 16 * VECTORS)
#pragma GCC unroll 8
        for (long r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (long v = 0; v < VECTORS; ++v) sums[r][v] = add_products(sums[r][v], a[r * row_step], b + 16 * v);
}
