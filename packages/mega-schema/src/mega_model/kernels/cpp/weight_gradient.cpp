// Adds a product of two matrices to a float32 one: main[o][i] += sum over t of grad[t][o] * x[t][i].
//
// Of bfloat16 factors torch makes such a product by way of bfloat16 outputs or float32 factors. The loops are those of Goto and van
// de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): panels of both factors are packed so that
// the innermost loop reads memory in order, and a tile of the sum stays in registers over a whole panel.

#include "tile.h"

namespace {

constexpr long ROWS = 8, VECTORS = 3;  // of a tile: 24 sums, 3 of x and one of grad fit in 32 registers
constexpr long COLUMNS = 16 * VECTORS;
constexpr long BLOCK = 64;  // columns of grad packed at once: with a panel of x they stay in the second cache

// two panels of 8 columns of grad from 16
void pack_grad(Pair* panels, long panel_size, const Bf16* from, long stride, long tokens, long columns) {
    for (long t = 0; t < tokens; t += 2) {
        const Bf16* a = from + t * stride;
        const __m512i both = interleaved(a, t + 1 < tokens ? a + stride : nullptr, columns);
        Pair* to = panels + t / 2 * ROWS;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(both));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + panel_size), _mm512_extracti64x4_epi64(both, 1));
    }
}

void pack_grad(float* panels, long panel_size, const float* from, long stride, long tokens, long columns) {
    for (long t = 0; t < tokens; ++t) {
        const __m512 both = load(from + t * stride, lanes(columns));
        _mm256_storeu_ps(panels + t * ROWS, _mm512_castps512_ps256(both));
        _mm256_storeu_ps(panels + panel_size + t * ROWS, _mm512_extractf32x8_ps(both, 1));
    }
}

struct Tile {
    float* main;
    long stride, rows, columns;
    bool overwrite, round;
};

void put(const Tile& tile, const __m512 (&sums)[ROWS][VECTORS]) {
    for (long r = 0; r < tile.rows; ++r)
        for (long v = 0; v < VECTORS; ++v) {
            const long left = tile.columns - 16 * v;
            if (left <= 0) break;
            const __mmask16 mask = lanes(left);
            float* at = tile.main + r * tile.stride + 16 * v;
            __m512 sum = sums[r][v];
            if (tile.round) sum = widened(narrowed(sum));
            if (!tile.overwrite) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, at));
            _mm512_mask_storeu_ps(at, mask, sum);
        }
}

template <typename Item>
int add(float* main, long main_stride, const Item* grad, long grad_stride, const Item* x, long x_stride, long tokens,
        long out, long in, bool overwrite, bool round, int threads) {
    using Word = typename Words<Item>::Word;
    constexpr long PER = Words<Item>::PER;
    // rounding needs the whole sum; else as many tokens at once as leave their panels in the caches
    const long most = round ? tokens : 1024 * PER;
    const long parts = std::max(1L, (tokens + most - 1) / most);
    const long step = ((tokens + parts - 1) / parts + PER - 1) / PER * PER;
    const long panels = (in + COLUMNS - 1) / COLUMNS, blocks = (out + BLOCK - 1) / BLOCK;
    const long longest = step / PER;
    const auto packed_x = room<Word>(panels * longest * COLUMNS);
    if (!packed_x) return 1;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const auto packed_grad = room<Word>(longest * BLOCK);
        failed = !packed_grad;
        for (long begin = 0; begin < tokens; begin += step) {
            const long some = std::min(step, tokens - begin), words = (some + PER - 1) / PER;
#pragma omp for schedule(static)
            for (long p = 0; p < panels; ++p)
                pack<COLUMNS>(packed_x.get() + p * longest * COLUMNS, x + begin * x_stride + p * COLUMNS, x_stride, some,
                              in - p * COLUMNS);
#pragma omp for schedule(static)
            for (long b = 0; b < blocks; ++b) {
                if (failed) continue;
                const long o = b * BLOCK, wide = std::min(BLOCK, out - o);
                for (long c = 0; c < wide; c += 16)
                    pack_grad(packed_grad.get() + c * longest, longest * ROWS, grad + begin * grad_stride + o + c,
                              grad_stride, some, wide - c);
                for (long p = 0; p < panels; ++p)
                    for (long r = 0; r < wide; r += ROWS) {
                        __m512 sums[ROWS][VECTORS];
                        multiply(sums, packed_grad.get() + r * longest, 1, ROWS,
                                 packed_x.get() + p * longest * COLUMNS, words);
                        put(Tile{main + (o + r) * main_stride + p * COLUMNS, main_stride, std::min(ROWS, wide - r),
                                 in - p * COLUMNS, overwrite && begin == 0, round},
                            sums);
                    }
            }
        }
    }
    return failed;
}

}  // namespace

extern "C" int mega_add_weight_gradient_bf16(float* main, long main_stride, const Bf16* grad, long grad_stride,
                                             const Bf16* x, long x_stride, long tokens, long out, long in,
                                             int overwrite, int round, int threads) {
    return add(main, main_stride, grad, grad_stride, x, x_stride, tokens, out, in, overwrite, round, threads);
}

extern "C" int mega_add_weight_gradient_f32(float* main, long main_stride, const float* grad, long grad_stride,
                                            const float* x, long x_stride, long tokens, long out, long in,
                                            int overwrite, int, int threads) {
    return add(main, main_stride, grad, grad_stride, x, x_stride, tokens, out, in, overwrite, false, threads);
}
