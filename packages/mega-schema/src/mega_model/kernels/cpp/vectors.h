// Sixteen numbers at a time: bfloat16 or float32 in memory, float32 in registers.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

using Bf16 = uint16_t;

// mask of the lanes that hold one of the `left` remaining columns
inline __mmask16 lanes(long left) {
    return left >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << std::max(left, 0L)) - 1);
}

inline __m512 widened(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 load(const Bf16* from, __mmask16 mask) { return widened(_mm256_maskz_loadu_epi16(mask, from)); }

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void store(Bf16* to, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, narrowed(x)); }

inline void store(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }

// x rounded to the type of the pointer, and back to float32
inline __m512 rounded(const Bf16*, __m512 x) { return widened(narrowed(x)); }
inline __m512 rounded(const float*, __m512 x) { return x; }

// exp(x) within one unit in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and exp(x) = 2^n times the Taylor
// polynomial of degree 7 in r; infinity on overflow
inline __m512 exp(__m512 x) {
    // clamp: infinity minus a multiple of ln 2 is not a number; for NaN, max and min return their second argument
    x = _mm512_min_ps(_mm512_set1_ps(200.0f), _mm512_max_ps(_mm512_set1_ps(-200.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    // ln 2 as a sum of two numbers; n times the first is exact
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
    return _mm512_scalef_ps(p, n);
}

// transpose a 16 x 16 matrix of words
inline void transpose(__m512 (&v)[16]) {
    __m512 w[16];
    for (int i = 0; i < 16; i += 2) {
        w[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    // v[4i + j] then holds columns j, j + 4, j + 8, j + 12 of rows 4i to 4i + 3, one per 128-bit lane
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            const __m512d a = _mm512_castps_pd(w[i + j]), b = _mm512_castps_pd(w[i + j + 2]);
            v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int j = 0; j < 4; ++j) {
        const __m512 even_low = _mm512_shuffle_f32x4(v[j], v[j + 4], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(v[j], v[j + 4], 0xdd);
        const __m512 even_high = _mm512_shuffle_f32x4(v[j + 8], v[j + 12], 0x88);
        const __m512 odd_high = _mm512_shuffle_f32x4(v[j + 8], v[j + 12], 0xdd);
        w[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        w[j + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        w[j + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        w[j + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
    for (int i = 0; i < 16; ++i) v[i] = w[i];
}
