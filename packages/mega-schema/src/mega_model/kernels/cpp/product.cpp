// Products of two matrices into a float32 matrix, overwriting it or adding to it:
//
//   weight gradient   main[o][i] += sum over t of grad[t][o] * x[t][i]       bfloat16 or float32
//   linear            y[t][o]     = sum over i of x[t][i] * weight[o][i]     float32
//   its input's grad  grad_x[t][i] = sum over o of grad[t][o] * weight[o][i]  float32
//
// torch computes the first, for bfloat16 factors, with a bfloat16 output or float32 factors. The loops are those of
// Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): panels of both factors are
// packed so that the innermost loop reads memory in order, and a tile of the sum stays in registers over a panel.

#include "tile.h"

namespace {

constexpr long ROWS = 8, VECTORS = 3;  // tile size: 24 sums, 3 vectors of b and one of a fit in 32 registers
constexpr long COLUMNS = 16 * VECTORS;
constexpr long BLOCK = 64;             // rows of a packed at once: with a panel of b they fit in the L2 cache
constexpr long LONGEST = 1024;         // words of a packed panel along the sum
constexpr long WIDEST = 32 * COLUMNS;  // columns of b packed at once: with LONGEST 6 MiB

// A factor in memory. Contiguous numbers are either at one position of the sum (`across`), or consecutive along it.
template <typename Item>
struct Factor {
    const Item* at;
    long stride;
    bool across;

    // address of this row or column of the product, at this position of the sum
    const Item* from(long line, long place) const {
        return across ? at + place * stride + line : at + line * stride + place;
    }
};

// pack 16 rows of a into two panels of 8 rows
void pack_rows(Pair* panels, long panel_size, const Factor<Bf16>& a, long row, long begin, long places, long rows) {
    for (long p = 0; p < places; p += 2) {
        const Bf16* first = a.from(row, begin + p);
        const __m512i both = interleaved(first, p + 1 < places ? first + a.stride : nullptr, rows);
        Pair* to = panels + p / 2 * ROWS;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(both));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + panel_size), _mm512_extracti64x4_epi64(both, 1));
    }
}

inline void put_rows(float* panels, long panel_size, long place, __m512 both) {
    _mm256_storeu_ps(panels + place * ROWS, _mm512_castps512_ps256(both));
    _mm256_storeu_ps(panels + panel_size + place * ROWS, _mm512_extractf32x8_ps(both, 1));
}

void pack_rows(float* panels, long panel_size, const Factor<float>& a, long row, long begin, long places, long rows) {
    if (a.across) {
        for (long p = 0; p < places; ++p) put_rows(panels, panel_size, p, load(a.from(row, begin + p), lanes(rows)));
        return;
    }
    for (long p = 0; p < places; p += 16) {
        __m512 v[16];
        load_across(v, a.from(row, begin + p), a.stride, rows, places - p);
        for (long i = 0; i < std::min(16L, places - p); ++i) put_rows(panels, panel_size, p + i, v[i]);
    }
}

void pack_columns(Pair* panel, const Factor<Bf16>& b, long column, long begin, long places, long columns) {
    pack<COLUMNS>(panel, b.from(column, begin), b.stride, places, columns);
}

void pack_columns(float* panel, const Factor<float>& b, long column, long begin, long places, long columns) {
    if (b.across) {
        pack<COLUMNS>(panel, b.from(column, begin), b.stride, places, columns);
        return;
    }
    pack_transposed<COLUMNS>(panel, b.from(column, begin), b.stride, columns, places);
}

struct Sum {
    float* at;
    long stride, rows, columns;
    bool overwrite, round;
};

void put(const Sum& out, long row, long column, bool overwrite, const __m512 (&sums)[ROWS][VECTORS]) {
    for (long r = 0; r < std::min(ROWS, out.rows - row); ++r)
        for (long v = 0; v < VECTORS; ++v) {
            const long left = out.columns - column - 16 * v;
            if (left <= 0) break;
            const __mmask16 mask = lanes(left);
            float* at = out.at + (row + r) * out.stride + column + 16 * v;
            __m512 sum = sums[r][v];
            if (out.round) sum = widened(narrowed(sum));
            if (!overwrite) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, at));
            _mm512_mask_storeu_ps(at, mask, sum);
        }
}

template <typename Item>
int add_product(const Sum& out, const Factor<Item>& a, const Factor<Item>& b, long places, int threads) {
    using Word = typename Words<Item>::Word;
    constexpr long PER = Words<Item>::PER;
    // rounding needs the whole sum at once; otherwise split the sum so that its panels fit in the caches
    const long most = out.round ? places : LONGEST * PER;
    const long parts = std::max(1L, (places + most - 1) / most);
    const long step = ((places + parts - 1) / parts + PER - 1) / PER * PER;
    const long longest = step / PER, blocks = std::max(1L, (out.rows + BLOCK - 1) / BLOCK);
    const auto packed_b = room<Word>(longest * std::min(WIDEST, (out.columns + COLUMNS - 1) / COLUMNS * COLUMNS));
    if (!packed_b) return 1;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const auto packed_a = room<Word>(longest * BLOCK);
        failed = !packed_a;
        for (long left = 0; left < out.columns; left += WIDEST) {
            const long panels = (std::min(WIDEST, out.columns - left) + COLUMNS - 1) / COLUMNS;
            // with fewer blocks of rows than threads can use, distribute the panels too
            const long groups = std::clamp((4L * threads + blocks - 1) / blocks, 1L, panels);
            for (long begin = 0; begin < places; begin += step) {
                const long some = std::min(step, places - begin), words = (some + PER - 1) / PER;
#pragma omp for schedule(static)
                for (long p = 0; p < panels; ++p) {
                    const long column = left + p * COLUMNS;
                    pack_columns(packed_b.get() + p * longest * COLUMNS, b, column, begin, some,
                                 out.columns - column);
                }
#pragma omp for schedule(static) collapse(2)
                for (long block = 0; block < blocks; ++block)
                    for (long g = 0; g < groups; ++g) {
                        if (failed) continue;
                        const long top = block * BLOCK, bottom = std::min(top + BLOCK, out.rows);
                        for (long row = top; row < bottom; row += 16)
                            pack_rows(packed_a.get() + (row - top) * longest, longest * ROWS, a, row, begin, some,
                                      bottom - row);
                        for (long p = g * panels / groups; p < (g + 1) * panels / groups; ++p)
                            for (long row = top; row < bottom; row += ROWS) {
                                __m512 sums[ROWS][VECTORS];
                                multiply(sums, packed_a.get() + (row - top) * longest, 1, ROWS,
                                         packed_b.get() + p * longest * COLUMNS, words);
                                put(out, row, left + p * COLUMNS, out.overwrite && begin == 0, sums);
                            }
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
    const Sum sum{main, main_stride, out, in, overwrite != 0, round != 0};
    return add_product<Bf16>(sum, {grad, grad_stride, true}, {x, x_stride, true}, tokens, threads);
}

extern "C" int mega_add_weight_gradient_f32(float* main, long main_stride, const float* grad, long grad_stride,
                                            const float* x, long x_stride, long tokens, long out, long in,
                                            int overwrite, int, int threads) {
    const Sum sum{main, main_stride, out, in, overwrite != 0, false};
    return add_product<float>(sum, {grad, grad_stride, true}, {x, x_stride, true}, tokens, threads);
}

// weight[o][i] is at o * weight_stride + i, or with `transposed` at i * weight_stride + o
extern "C" int mega_linear_f32(float* y, long y_stride, const float* x, long x_stride, const float* weight,
                               long weight_stride, long tokens, long out, long in, int overwrite, int transposed,
                               int threads) {
    const Sum sum{y, y_stride, tokens, out, overwrite != 0, false};
    return add_product<float>(sum, {x, x_stride, false}, {weight, weight_stride, transposed != 0}, in, threads);
}
