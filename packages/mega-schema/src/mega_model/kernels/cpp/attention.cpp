// Attention over bfloat16, forward and backward, as flash-attention has it (arXiv:2307.08691): a block of queries
// meets all keys that it sees while their scores lie in the cache; scores, softmax and sums are float32; backward
// makes the probabilities again. With s queries and S keys, query i sees the keys up to i + S - s.

#include <limits>

#include "tile.h"

namespace {

constexpr long ROWS = 6, VECTORS = 4, WIDE = 16 * VECTORS;  // 24 sums, 4 of b, one of a: 29 of 32 registers

struct Matrix {  // rows of bfloat16
    Bf16* at;
    long stride;
    Bf16* row(long i) const { return at + i * stride; }
};

struct Tensor {  // (B, heads, tokens, width), the width dense
    Bf16* at;
    const long* strides;
    Matrix of(long b, long head) const { return {at + b * strides[0] + head * strides[1], strides[2]}; }
};

long up(long count, long unit) { return (count + unit - 1) / unit * unit; }

// transposes 16 x 16 numbers of 32 bits
void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

// the transpose of a matrix in panels of 64 of its rows: panel[pair of columns][64]
void pack_transposed(Pair* panels, const Matrix& x, long rows, long width) {
    const long pairs = width / 2;
    for (long begin = 0; begin < rows; begin += WIDE, panels += pairs * WIDE)
        for (long r = 0; r < WIDE; r += 16)
            for (long p = 0; p < pairs; p += 16) {
                __m512i some[16];
                for (long i = 0; i < 16; ++i)
                    some[i] = begin + r + i < rows
                                  ? _mm512_maskz_loadu_epi32(lanes(pairs - p), x.row(begin + r + i) + 2 * p)
                                  : _mm512_setzero_si512();
                transpose(some);
                for (long i = 0; i < std::min(16L, pairs - p); ++i)
                    _mm512_store_si512(panels + (p + i) * WIDE + r, some[i]);
            }
}

// a matrix in panels of 64 of its columns: panel[pair of rows][64]
void pack_rows(Pair* panels, const Matrix& x, long rows, long width) {
    for (long c = 0; c < width; c += WIDE, panels += (rows + 1) / 2 * WIDE)
        pack<WIDE>(panels, x.at + c, x.stride, rows, width - c);
}

// out = a b, or out += a b: float32, of `rows` rows and whole panels of b; the pairs of a's rows as `multiply` has them
template <bool ADD>
void product(float* out, long stride, long rows, const Pair* a, long row_step, long pair_step, const Pair* b,
             long b_pairs, long pairs, long columns) {
    for (long c = 0; c < columns; c += WIDE, b += b_pairs * WIDE)
        for (long r = 0; r < rows; r += ROWS) {
            __m512 sums[ROWS][VECTORS];
            multiply(sums, a + r * row_step, row_step, pair_step, b, pairs);
            for (long i = 0; i < std::min(ROWS, rows - r); ++i)
                for (long v = 0; v < VECTORS; ++v) {
                    float* at = out + (r + i) * stride + c + 16 * v;
                    _mm512_storeu_ps(at, ADD ? _mm512_add_ps(_mm512_loadu_ps(at), sums[i][v]) : sums[i][v]);
                }
        }
}

struct Shape {
    long batch, heads, key_heads, queries, keys, width;
    float scale;
    bool causal;

    long each() const { return heads / key_heads; }
    long wide() const { return up(width, WIDE); }
    long padded() const { return up(keys, WIDE); }
    // queries of a block: their scores are to stay in the second cache
    long block() const { return padded() <= 1024 ? 96 : padded() <= 4096 ? 48 : 24; }
    long seen(long query) const { return causal ? query + 1 + keys - queries : keys; }
};

// what a block of queries is computed in
struct Block {
    std::unique_ptr<float, Freed> score, grad;
    std::unique_ptr<Bf16, Freed> rounded, rows;
    std::unique_ptr<float, Freed> out;

    explicit Block(const Shape& shape, bool backward)
        : score(room<float>(shape.block() * shape.padded())),
          grad(room<float>(backward ? shape.block() * shape.padded() : 1)),
          rounded(room<Bf16>((shape.block() + ROWS) * shape.padded())),
          rows(room<Bf16>((shape.block() + ROWS) * shape.width)),
          out(room<float>(shape.block() * shape.wide())) {}
    bool ready() const { return score && grad && rounded && rows && out; }
};

// rows of a matrix beside each other, and zeros for the rows that a tile has beyond them
Pair* gather(Bf16* to, const Matrix& from, long begin, long count, long width) {
    for (long r = 0; r < up(count, ROWS); ++r)
        for (long c = 0; c < width; c += 16) {
            const __mmask16 mask = r < count ? lanes(width - c) : __mmask16{0};
            const __m256i some = _mm256_maskz_loadu_epi16(mask, from.row(begin + r) + c);
            _mm256_mask_storeu_epi16(to + r * width + c, lanes(width - c), some);
        }
    return reinterpret_cast<Pair*>(to);
}

void scale_into(Bf16* to, const float* from, float scale, long width) {
    for (long c = 0; c < width; c += 16)
        store(to + c, _mm512_mul_ps(_mm512_loadu_ps(from + c), _mm512_set1_ps(scale)), lanes(width - c));
}

// one row of scores to probabilities, in place and rounded; zeros after the keys that are seen
void softmax(float* score, Bf16* rounded, long seen, long end, float scale) {
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (long c = 0; c < seen; c += 16)
        largest = _mm512_mask_max_ps(largest, lanes(seen - c), largest, _mm512_loadu_ps(score + c));
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 shift = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(largest)), factor);
    __m512 sum = _mm512_setzero_ps();
    for (long c = 0; c < seen; c += 16) {
        const __m512 e = exp(_mm512_fmsub_ps(_mm512_loadu_ps(score + c), factor, shift));
        sum = _mm512_mask_add_ps(sum, lanes(seen - c), sum, e);
        _mm512_storeu_ps(score + c, e);
    }
    const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (long c = 0; c < end; c += 16) {
        const __m512 p = _mm512_maskz_mul_ps(lanes(seen - c), _mm512_loadu_ps(score + c), share);
        _mm512_storeu_ps(score + c, p);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + c), narrowed(p));
    }
}

// p (grad - sum of p grad) over the keys, rounded
void softmax_backward(const float* p, const float* grad, Bf16* rounded, long end) {
    __m512 sum = _mm512_setzero_ps();
    for (long c = 0; c < end; c += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(p + c), _mm512_loadu_ps(grad + c), sum);
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
    for (long c = 0; c < end; c += 16) {
        const __m512 made = _mm512_mul_ps(_mm512_loadu_ps(p + c), _mm512_sub_ps(_mm512_loadu_ps(grad + c), mean));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + c), narrowed(made));
    }
}

// the probabilities of queries begin to begin + count, in `score` and `rounded`; returns the columns, whole panels
long probabilities(const Block& block, const Shape& shape, const Matrix& q, const Pair* keys, long begin, long count) {
    const long padded = shape.padded(), pairs = shape.width / 2;
    const long end = up(shape.seen(begin + count - 1), WIDE);
    const Pair* rows = gather(block.rows.get(), q, begin, count, shape.width);
    product<false>(block.score.get(), padded, count, rows, pairs, 1, keys, pairs, pairs, end);
    for (long r = 0; r < count; ++r)
        softmax(block.score.get() + r * padded, block.rounded.get() + r * padded, shape.seen(begin + r), end,
                shape.scale);
    return end;
}

}  // namespace

extern "C" int mega_attention(Bf16* out, Bf16* q, Bf16* k, Bf16* v, const long* strides, long batch, long heads,
                              long key_heads, long queries, long keys, long width, float scale, int causal,
                              int threads) {
    const Shape shape{batch, heads, key_heads, queries, keys, width, scale, causal != 0};
    const Tensor of_out{out, strides}, of_q{q, strides + 3}, of_k{k, strides + 6}, of_v{v, strides + 9};
    const long padded = shape.padded(), wide = shape.wide();
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const auto packed_k = room<Pair>(padded * width / 2), packed_v = room<Pair>(padded / 2 * wide);
        const Block block(shape, false);
        failed = !packed_k || !packed_v || !block.ready();
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < batch; ++b)
            for (long head = 0; head < heads; ++head) {
                if (failed) continue;
                const long group = head / shape.each();
                pack_transposed(packed_k.get(), of_k.of(b, group), keys, width);
                pack_rows(packed_v.get(), of_v.of(b, group), keys, width);
                const Matrix from = of_q.of(b, head), to = of_out.of(b, head);
                for (long begin = 0; begin < queries; begin += shape.block()) {
                    const long count = std::min(shape.block(), queries - begin);
                    const long end = probabilities(block, shape, from, packed_k.get(), begin, count);
                    // probabilities after the keys are zero, and so may be what the last panel has there
                    const long pairs = (std::min(end, keys) + 1) / 2;
                    product<false>(block.out.get(), wide, count, reinterpret_cast<Pair*>(block.rounded.get()),
                                   padded / 2, 1, packed_v.get(), (keys + 1) / 2, pairs, wide);
                    for (long r = 0; r < count; ++r)
                        scale_into(to.row(begin + r), block.out.get() + r * wide, 1.0f, width);
                }
            }
    }
    return failed;
}

extern "C" int mega_attention_backward(Bf16* grad_q, Bf16* grad_k, Bf16* grad_v, Bf16* grad, Bf16* q, Bf16* k, Bf16* v,
                                       const long* strides, long batch, long heads, long key_heads, long queries,
                                       long keys, long width, float scale, int causal, int threads) {
    const Shape shape{batch, heads, key_heads, queries, keys, width, scale, causal != 0};
    const Tensor to_q{grad_q, strides}, to_k{grad_k, strides + 3}, to_v{grad_v, strides + 6}, of_grad{grad, strides + 9};
    const Tensor of_q{q, strides + 12}, of_k{k, strides + 15}, of_v{v, strides + 18};
    const long padded = shape.padded(), wide = shape.wide(), most = shape.block();
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const auto turned_k = room<Pair>(padded * width / 2), turned_v = room<Pair>(padded * width / 2);
        const auto packed_k = room<Pair>(padded / 2 * wide), packed_rows = room<Pair>((most + 1) / 2 * wide);
        const auto paired = room<Pair>((most + 1) / 2 * padded + ROWS);
        const auto sum_k = room<float>((padded + ROWS) * wide), sum_v = room<float>((padded + ROWS) * wide);
        const Block block(shape, true);
        failed = !turned_k || !turned_v || !packed_k || !packed_rows || !paired || !sum_k || !sum_v || !block.ready();
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < batch; ++b)
            for (long group = 0; group < key_heads; ++group) {
                if (failed) continue;
                pack_transposed(turned_k.get(), of_k.of(b, group), keys, width);
                pack_transposed(turned_v.get(), of_v.of(b, group), keys, width);
                pack_rows(packed_k.get(), of_k.of(b, group), keys, width);
                std::fill_n(sum_k.get(), keys * wide, 0.0f);
                std::fill_n(sum_v.get(), keys * wide, 0.0f);
                for (long head = group * shape.each(); head < (group + 1) * shape.each(); ++head)
                    for (long begin = 0; begin < queries; begin += most) {
                        const long count = std::min(most, queries - begin), pairs = (count + 1) / 2;
                        const Matrix rounded{block.rounded.get(), padded};
                        // sum[key] += sum over the queries of what is rounded there, times a row of theirs
                        const auto add = [&](float* sum, const Matrix& rows, long end) {
                            for (long c = 0; c < end; c += 16)
                                for (long p = 0; p < pairs; ++p) {
                                    const Bf16* second = 2 * p + 1 < count ? rounded.row(2 * p + 1) + c : nullptr;
                                    _mm512_storeu_si512(paired.get() + p * padded + c,
                                                        interleaved(rounded.row(2 * p) + c, second, 16));
                                }
                            pack_rows(packed_rows.get(), {rows.row(begin), rows.stride}, count, width);
                            product<true>(sum, wide, std::min(end, keys), paired.get(), 1, padded, packed_rows.get(),
                                          pairs, pairs, wide);
                        };
                        const Matrix from = of_q.of(b, head), grads = of_grad.of(b, head);
                        const long end = probabilities(block, shape, from, turned_k.get(), begin, count);
                        add(sum_v.get(), grads, end);
                        const Pair* rows = gather(block.rows.get(), grads, begin, count, width);
                        product<false>(block.grad.get(), padded, count, rows, width / 2, 1, turned_v.get(), width / 2,
                                       width / 2, end);
                        for (long r = 0; r < count; ++r)
                            softmax_backward(block.score.get() + r * padded, block.grad.get() + r * padded,
                                             rounded.row(r), end);
                        add(sum_k.get(), from, end);
                        product<false>(block.out.get(), wide, count, reinterpret_cast<Pair*>(rounded.at), padded / 2, 1,
                                       packed_k.get(), (keys + 1) / 2, (std::min(end, keys) + 1) / 2, wide);
                        for (long r = 0; r < count; ++r)
                            scale_into(to_q.of(b, head).row(begin + r), block.out.get() + r * wide, scale, width);
                    }
                for (long key = 0; key < keys; ++key) {
                    scale_into(to_k.of(b, group).row(key), sum_k.get() + key * wide, scale, width);
                    scale_into(to_v.of(b, group).row(key), sum_v.get() + key * wide, 1.0f, width);
                }
            }
    }
    return failed;
}
