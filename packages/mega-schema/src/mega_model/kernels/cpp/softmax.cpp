// softmax over rows in place, and the logarithm of each row's sum: two passes over a row, which stays
// in the second cache (Milakov and Gimelshein, arXiv:1805.02867: the largest and the sum are found together).

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

template <typename Item>
int softmax(Item* logits, long stride, long rows, long columns, float scale, float* log_sums, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; ++row) {
        Item* z = logits + row * stride;
        const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        __m512 largest = least;
        for (long c = 0; c < columns; c += 16) {
            const __mmask16 mask = lanes(columns - c);
            largest = _mm512_mask_max_ps(largest, mask, largest, load(z + c, mask));
        }
        const float most = _mm512_reduce_max_ps(largest);
        const __m512 shift = _mm512_set1_ps(most);
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};  // two, for they wait for each other
        for (long c = 0; c < columns; c += 32)
            for (int i = 0; i < 2; ++i) {
                const __mmask16 mask = lanes(columns - c - 16 * i);
                const __m512 e = exp(_mm512_sub_ps(load(z + c + 16 * i, mask), shift));
                sums[i] = _mm512_mask_add_ps(sums[i], mask, sums[i], e);
            }
        const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
        log_sums[row] = most + std::log(sum);
        const __m512 share = _mm512_set1_ps(scale / sum);
        for (long c = 0; c < columns; c += 16) {
            const __mmask16 mask = lanes(columns - c);
            store(z + c, _mm512_mul_ps(exp(_mm512_sub_ps(load(z + c, mask), shift)), share), mask);
        }
    }
    return 0;
}

}  // namespace

extern "C" int mega_softmax_bf16(Bf16* logits, long stride, long rows, long columns, float scale, float* log_sums,
                                 int threads) {
    return softmax(logits, stride, rows, columns, scale, log_sums, threads);
}

extern "C" int mega_softmax_f32(float* logits, long stride, long rows, long columns, float scale, float* log_sums,
                                int threads) {
    return softmax(logits, stride, rows, columns, scale, log_sums, threads);
}
