// GELU with the tanh approximation (arXiv:1606.08415): u / (1 + exp(-2 y)), y = sqrt(2 / pi) (u + 0.044715 u^3),
// u = x + bias.

#include "vectors.h"

namespace {

constexpr float TWICE = 1.5957691216f, CUBIC = 0.044715f;  // 2 sqrt(2 / pi)

struct Gelu {
    __m512 value, slope;
};

Gelu gelu(__m512 u) {
    const __m512 one = _mm512_set1_ps(1.0f), square = _mm512_mul_ps(u, u);
    const __m512 twice_y = _mm512_mul_ps(
        _mm512_mul_ps(u, _mm512_set1_ps(TWICE)), _mm512_fmadd_ps(square, _mm512_set1_ps(CUBIC), one));
    const __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), twice_y))));
    const __m512 twice_slope =
        _mm512_mul_ps(_mm512_set1_ps(TWICE), _mm512_fmadd_ps(square, _mm512_set1_ps(3 * CUBIC), one));
    const __m512 value = _mm512_mul_ps(u, sigmoid);
    const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_sub_ps(one, sigmoid)), twice_slope, sigmoid);
    return {value, slope};
}

// x + bias, rounded to Item like torch's input of GELU
template <typename Item>
__m512 biased(const Item* x, const Item* bias, long c, __mmask16 mask) {
    const __m512 values = load(x + c, mask);
    return bias == nullptr ? values : rounded(x, _mm512_add_ps(values, load(bias + c, mask)));
}

template <typename Item>
int forward(Item* out, const Item* x, const Item* bias, long rows, long columns, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; ++row)
        for (long c = 0; c < columns; c += 16) {
            const __mmask16 mask = lanes(columns - c);
            store(out + row * columns + c, gelu(biased(x + row * columns, bias, c, mask)).value, mask);
        }
    return 0;
}

// grad_x, and with a bias its sum over the rows. Each thread takes a range of columns, so that a column is summed in
// the order of the rows for any number of threads. It walks along the rows: down the columns, every step would touch
// another page of memory.
template <typename Item>
int backward(Item* grad_x, float* grad_bias, const Item* grad, const Item* x, const Item* bias, long rows, long columns,
             int threads) {
    constexpr long LINE = 128;  // columns; a multiple of a cache line, so that no two threads write to the same line
    const long lines = (columns + LINE - 1) / LINE, width = (lines + threads - 1) / threads * LINE;
    if (grad_bias != nullptr) std::fill(grad_bias, grad_bias + columns, 0.0f);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long begin = 0; begin < columns; begin += width) {
        const long end = std::min(begin + width, columns);
        for (long row = 0; row < rows; ++row)
            for (long c = begin; c < end; c += 16) {
                const long at = row * columns + c;
                const __mmask16 mask = lanes(end - c);
                const __m512 slope = gelu(biased(x + row * columns, bias, c, mask)).slope;
                const __m512 product = rounded(x, _mm512_mul_ps(load(grad + at, mask), slope));
                store(grad_x + at, product, mask);
                if (grad_bias != nullptr) store(grad_bias + c, _mm512_add_ps(load(grad_bias + c, mask), product), mask);
            }
    }
    return 0;
}

}  // namespace

extern "C" int mega_gelu_bf16(Bf16* out, const Bf16* x, const Bf16* bias, long rows, long columns, int threads) {
    return forward(out, x, bias, rows, columns, threads);
}

extern "C" int mega_gelu_f32(float* out, const float* x, const float* bias, long rows, long columns, int threads) {
    return forward(out, x, bias, rows, columns, threads);
}

extern "C" int mega_gelu_backward_bf16(Bf16* grad_x, float* grad_bias, const Bf16* grad, const Bf16* x,
                                       const Bf16* bias, long rows, long columns, int threads) {
    return backward(grad_x, grad_bias, grad, x, bias, rows, columns, threads);
}

extern "C" int mega_gelu_backward_f32(float* grad_x, float* grad_bias, const float* grad, const float* x,
                                      const float* bias, long rows, long columns, int threads) {
    return backward(grad_x, grad_bias, grad, x, bias, rows, columns, threads);
}
