// Softmax over rows in place, and the logarithm of each row's sum. A row stays in the L2 cache: one pass finds the
// largest logit, one stores the exponentials and sums them, one divides. The exponentials are stored in float32: the
// result is rounded as if they were computed twice, in half the time.

#include <cmath>
#include <limits>
#include <type_traits>

#include "memory.h"
#include "vectors.h"

namespace {

template <typename Item>
float row_softmax(Item* z, float* exps, long columns, float scale) {
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (long c = 0; c < columns; c += 16) {
        const __mmask16 mask = lanes(columns - c);
        largest = _mm512_mask_max_ps(largest, mask, largest, load(z + c, mask));
    }
    const float most = _mm512_reduce_max_ps(largest);
    const __m512 shift = _mm512_set1_ps(most);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};  // two independent chains of additions overlap
    for (long c = 0; c < columns; c += 32)
        for (int i = 0; i < 2; ++i) {
            const long at = c + 16 * i;
            const __mmask16 mask = lanes(columns - at);
            const __m512 e = exp(_mm512_sub_ps(load(z + at, mask), shift));
            store(exps + at, e, mask);
            sums[i] = _mm512_mask_add_ps(sums[i], mask, sums[i], e);
        }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    const __m512 factor = _mm512_set1_ps(scale / sum);
    for (long c = 0; c < columns; c += 16) {
        const __mmask16 mask = lanes(columns - c);
        store(z + c, _mm512_mul_ps(load(exps + c, mask), factor), mask);
    }
    return most + std::log(sum);
}

template <typename Item>
int softmax(Item* logits, long stride, long rows, long columns, float scale, float* log_sums, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        if constexpr (std::is_same_v<Item, float>) {  // the exponentials replace the logits
#pragma omp for schedule(static)
            for (long row = 0; row < rows; ++row) {
                float* z = logits + row * stride;
                log_sums[row] = row_softmax(z, z, columns, scale);
            }
        } else {
            const auto exps = room<float>(columns);
            failed = !exps;
#pragma omp for schedule(static)
            for (long row = 0; row < rows; ++row)
                if (!failed) log_sums[row] = row_softmax(logits + row * stride, exps.get(), columns, scale);
        }
    }
    return failed;
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
