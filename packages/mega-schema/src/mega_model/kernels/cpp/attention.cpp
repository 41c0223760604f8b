// Attention, forward and backward, as in flash-attention (arXiv:2307.08691): the scores of a block of queries and all
// keys that it sees stay in the cache; scores, softmax and sums are float32; backward recomputes the probabilities.
// With s queries and S keys, causal query i sees the keys up to i + S - s.

#include <limits>

#include "tile.h"

namespace {

constexpr long ROWS = 6, VECTORS = 4, WIDE = 16 * VECTORS;  // 24 sums, 4 of b, one of a: 29 of 32 registers

template <typename Item>
struct Matrix {
    Item* at;
    long stride;
    Item* row(long i) const { return at + i * stride; }
};

template <typename Item>
struct Tensor {  // (B, heads, tokens, width), the width contiguous
    Item* at;
    const long* strides;
    Matrix<Item> of(long b, long head) const { return {at + b * strides[0] + head * strides[1], strides[2]}; }
};

long up(long count, long unit) { return (count + unit - 1) / unit * unit; }

// pack the transpose of a matrix in panels of 64 of its rows: panel[word of a row][64]
template <typename Item, typename Word = typename Words<Item>::Word>
void pack_transposed(Word* panels, const Matrix<Item>& x, long rows, long width) {
    const long words = width / Words<Item>::PER;
    for (long begin = 0; begin < rows; begin += WIDE, panels += words * WIDE)
        ::pack_transposed<WIDE>(panels, x.row(begin), x.stride, rows - begin, words);
}

// number of words for `count` numbers along the summed dimension
template <typename Item>
long words(long count) {
    return (count + Words<Item>::PER - 1) / Words<Item>::PER;
}

// pack a matrix in panels of 64 of its columns: panel[word of a column][64]
template <typename Item, typename Word = typename Words<Item>::Word>
void pack_rows(Word* panels, const Matrix<Item>& x, long rows, long width) {
    for (long c = 0; c < width; c += WIDE, panels += words<Item>(rows) * WIDE)
        pack<WIDE>(panels, x.at + c, x.stride, rows, width - c);
}

// out = a b, or out += a b: float32, of `rows` rows and whole panels of b; a is addressed as in `multiply`
template <bool ADD, typename Word>
void product(float* out, long stride, long rows, const Word* a, long row_step, long word_step, const Word* b,
             long b_words, long words, long columns) {
    for (long c = 0; c < columns; c += WIDE, b += b_words * WIDE)
        for (long r = 0; r < rows; r += ROWS) {
            __m512 sums[ROWS][VECTORS];
            multiply(sums, a + r * row_step, row_step, word_step, b, words);
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
    // queries per block: their scores fit in the L2 cache
    long block() const { return padded() <= 1024 ? 96 : padded() <= 4096 ? 48 : 24; }
    long seen(long query) const { return causal ? query + 1 + keys - queries : keys; }
};

// buffers for one block of queries
template <typename Item>
struct Block {
    std::unique_ptr<float, Freed> score, grad;
    std::unique_ptr<Item, Freed> rounded, rows;
    std::unique_ptr<float, Freed> out;

    explicit Block(const Shape& shape, bool backward)
        : score(room<float>(shape.block() * shape.padded())),
          grad(room<float>(backward ? shape.block() * shape.padded() : 1)),
          rounded(room<Item>((shape.block() + ROWS) * shape.padded())),
          rows(room<Item>((shape.block() + ROWS) * shape.width)),
          out(room<float>(shape.block() * shape.wide())) {}
    bool ready() const { return score && grad && rounded && rows && out; }
};

template <typename Item>
const typename Words<Item>::Word* as_words(const Item* x) {
    return reinterpret_cast<const typename Words<Item>::Word*>(x);
}

// copy rows of a matrix to contiguous memory, padded with zero rows to whole tiles
template <typename Item>
void gather(Item* to, const Matrix<Item>& from, long begin, long count, long width) {
    for (long r = 0; r < count; ++r) std::copy_n(from.row(begin + r), width, to + r * width);
    std::fill_n(to + count * width, (up(count, ROWS) - count) * width, Item{});
}

template <typename Item>
void scale_into(Item* to, const float* from, float scale, long width) {
    for (long c = 0; c < width; c += 16)
        store(to + c, _mm512_mul_ps(_mm512_loadu_ps(from + c), _mm512_set1_ps(scale)), lanes(width - c));
}

// softmax of one row of scores, in place and rounded to Item; zeros for hidden keys
template <typename Item>
void softmax(float* score, Item* rounded, long seen, long end, float scale) {
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
    const __m512 normalizer = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (long c = 0; c < end; c += 16) {
        const __m512 p = _mm512_maskz_mul_ps(lanes(seen - c), _mm512_loadu_ps(score + c), normalizer);
        _mm512_storeu_ps(score + c, p);
        store(rounded + c, p, lanes(16));
    }
}

// gradient of the scores: p (grad - sum of p grad) over the keys, rounded to Item
template <typename Item>
void softmax_backward(const float* p, const float* grad, Item* rounded, long end) {
    __m512 sum = _mm512_setzero_ps();
    for (long c = 0; c < end; c += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(p + c), _mm512_loadu_ps(grad + c), sum);
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
    for (long c = 0; c < end; c += 16) {
        const __m512 made = _mm512_mul_ps(_mm512_loadu_ps(p + c), _mm512_sub_ps(_mm512_loadu_ps(grad + c), mean));
        store(rounded + c, made, lanes(16));
    }
}

// compute the probabilities of queries begin to begin + count in `score` and `rounded`; returns the columns, a multiple
// of the panel width
template <typename Item, typename Word = typename Words<Item>::Word>
long probabilities(const Block<Item>& block, const Shape& shape, const Matrix<Item>& q, const Word* keys, long begin,
                   long count) {
    const long padded = shape.padded(), size = shape.width / Words<Item>::PER;
    const long end = up(shape.seen(begin + count - 1), WIDE);
    gather(block.rows.get(), q, begin, count, shape.width);
    product<false>(block.score.get(), padded, count, as_words(block.rows.get()), size, 1, keys, size, size, end);
    for (long r = 0; r < count; ++r)
        softmax(block.score.get() + r * padded, block.rounded.get() + r * padded, shape.seen(begin + r), end,
                shape.scale);
    return end;
}

template <typename Item>
int forward(Item* out, Item* q, Item* k, Item* v, const long* strides, const Shape& shape, int threads) {
    using Word = typename Words<Item>::Word;
    constexpr long PER = Words<Item>::PER;
    const Tensor<Item> of_out{out, strides}, of_q{q, strides + 3}, of_k{k, strides + 6}, of_v{v, strides + 9};
    const long padded = shape.padded(), wide = shape.wide(), keys = shape.keys, width = shape.width;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const auto turned_k = room<Word>(padded * width / PER), packed_v = room<Word>(padded / PER * wide);
        const Block<Item> block(shape, false);
        failed = !turned_k || !packed_v || !block.ready();
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < shape.batch; ++b)
            for (long head = 0; head < shape.heads; ++head) {
                if (failed) continue;
                const long group = head / shape.each();
                pack_transposed(turned_k.get(), of_k.of(b, group), keys, width);
                pack_rows(packed_v.get(), of_v.of(b, group), keys, width);
                const Matrix<Item> from = of_q.of(b, head), to = of_out.of(b, head);
                for (long begin = 0; begin < shape.queries; begin += shape.block()) {
                    const long count = std::min(shape.block(), shape.queries - begin);
                    const long end = probabilities<Item>(block, shape, from, turned_k.get(), begin, count);
                    product<false>(block.out.get(), wide, count, as_words(block.rounded.get()), padded / PER, 1,
                                   packed_v.get(), words<Item>(keys), words<Item>(std::min(end, keys)), wide);
                    for (long r = 0; r < count; ++r)
                        scale_into(to.row(begin + r), block.out.get() + r * wide, 1.0f, width);
                }
            }
    }
    return failed;
}

// a block of rows whose columns are the rows of a product's first factor
template <typename Item>
struct Turned {
    using Word = typename Words<Item>::Word;

    const Word* words;
    long step;

    // interleave pairs of rows in `room`
    static Turned of(const Matrix<Bf16>& x, long count, long columns, Pair* room) {
        for (long p = 0; p < count; p += 2)
            for (long c = 0; c < columns; c += 16)
                _mm512_storeu_si512(room + p / 2 * x.stride + c,
                                    interleaved(x.row(p) + c, p + 1 < count ? x.row(p + 1) + c : nullptr, 16));
        return {room, x.stride};
    }
    static Turned of(const Matrix<float>& x, long, long, float*) { return {x.at, x.stride}; }
};

template <typename Item>
int backward(Item* grad_q, Item* grad_k, Item* grad_v, Item* grad, Item* q, Item* k, Item* v, const long* strides,
             const Shape& shape, int threads) {
    using Word = typename Words<Item>::Word;
    constexpr long PER = Words<Item>::PER;
    const Tensor<Item> to_q{grad_q, strides}, to_k{grad_k, strides + 3}, to_v{grad_v, strides + 6};
    const Tensor<Item> of_grad{grad, strides + 9}, of_q{q, strides + 12}, of_k{k, strides + 15}, of_v{v, strides + 18};
    const long padded = shape.padded(), wide = shape.wide(), keys = shape.keys, width = shape.width;
    const long size = width / PER, most = shape.block();
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        const auto turned_k = room<Word>(padded * size), turned_v = room<Word>(padded * size);
        const auto packed_k = room<Word>(padded / PER * wide), packed_rows = room<Word>(most / PER * wide);
        const auto paired = room<Word>(most / PER * padded + ROWS);
        const auto sum_k = room<float>(padded * wide), sum_v = room<float>(padded * wide);
        const Block<Item> block(shape, true);
        failed = !turned_k || !turned_v || !packed_k || !packed_rows || !paired || !sum_k || !sum_v || !block.ready();
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < shape.batch; ++b)
            for (long group = 0; group < shape.key_heads; ++group) {
                if (failed) continue;
                pack_transposed(turned_k.get(), of_k.of(b, group), keys, width);
                pack_transposed(turned_v.get(), of_v.of(b, group), keys, width);
                pack_rows(packed_k.get(), of_k.of(b, group), keys, width);
                std::fill_n(sum_k.get(), keys * wide, 0.0f);
                std::fill_n(sum_v.get(), keys * wide, 0.0f);
                for (long head = group * shape.each(); head < (group + 1) * shape.each(); ++head)
                    for (long begin = 0; begin < shape.queries; begin += most) {
                        const long count = std::min(most, shape.queries - begin);
                        const Matrix<Item> rounded{block.rounded.get(), padded};
                        const Matrix<Item> from = of_q.of(b, head), grads = of_grad.of(b, head);
                        // sum[key] += sum over the block's queries of rounded[query][key] * rows[query]
                        const auto add = [&](float* sum, const Matrix<Item>& rows, long end) {
                            const auto turned = Turned<Item>::of(rounded, count, end, paired.get());
                            pack_rows(packed_rows.get(), Matrix<Item>{rows.row(begin), rows.stride}, count, width);
                            product<true>(sum, wide, std::min(end, keys), turned.words, 1, turned.step,
                                          packed_rows.get(), words<Item>(count), words<Item>(count), wide);
                        };
                        const long end = probabilities<Item>(block, shape, from, turned_k.get(), begin, count);
                        add(sum_v.get(), grads, end);
                        gather(block.rows.get(), grads, begin, count, width);
                        product<false>(block.grad.get(), padded, count, as_words(block.rows.get()), size, 1,
                                       turned_v.get(), size, size, end);
                        for (long r = 0; r < count; ++r)
                            softmax_backward(block.score.get() + r * padded, block.grad.get() + r * padded,
                                             rounded.row(r), end);
                        add(sum_k.get(), from, end);
                        product<false>(block.out.get(), wide, count, as_words(rounded.at), padded / PER, 1,
                                       packed_k.get(), words<Item>(keys), words<Item>(std::min(end, keys)), wide);
                        for (long r = 0; r < count; ++r)
                            scale_into(to_q.of(b, head).row(begin + r), block.out.get() + r * wide, shape.scale, width);
                    }
                for (long key = 0; key < keys; ++key) {
                    scale_into(to_k.of(b, group).row(key), sum_k.get() + key * wide, shape.scale, width);
                    scale_into(to_v.of(b, group).row(key), sum_v.get() + key * wide, 1.0f, width);
                }
            }
    }
    return failed;
}

}  // namespace

// With bfloat16 the width must be even. `strides` holds the strides of batch, head and token of each tensor, in order.
#define MEGA_ATTENTION(ITEM, NAME)                                                                                   \
    extern "C" int mega_attention_##NAME(ITEM* out, ITEM* q, ITEM* k, ITEM* v, const long* strides, long batch,      \
                                         long heads, long key_heads, long queries, long keys, long width,            \
                                         float scale, int causal, int threads) {                                     \
        const Shape shape{batch, heads, key_heads, queries, keys, width, scale, causal != 0};                        \
        return forward(out, q, k, v, strides, shape, threads);                                                       \
    }                                                                                                                \
    extern "C" int mega_attention_backward_##NAME(ITEM* grad_q, ITEM* grad_k, ITEM* grad_v, ITEM* grad, ITEM* q,     \
                                                  ITEM* k, ITEM* v, const long* strides, long batch, long heads,     \
                                                  long key_heads, long queries, long keys, long width, float scale,  \
                                                  int causal, int threads) {                                         \
        const Shape shape{batch, heads, key_heads, queries, keys, width, scale, causal != 0};                        \
        return backward(grad_q, grad_k, grad_v, grad, q, k, v, strides, shape, threads);                             \
    }

MEGA_ATTENTION(Bf16, bf16)
MEGA_ATTENTION(float, f32)
