// Train byte-pair merges on counted words, with the results of byte_pairs.train_reference.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using u64 = std::uint64_t;

constexpr u64 MULTIPLIER = 0x9E3779B97F4A7C15, FREE = ~u64{0};

u64 pair_of(std::int32_t left, std::int32_t right) {
    return static_cast<u64>(left) << 32 | static_cast<std::uint32_t>(right);
}

// numbers pairs of tokens in the order of their first occurrence
class PairTable {
  public:
    PairTable() : keys_(1 << 12, FREE), numbers_(1 << 12) {}

    std::int32_t number(u64 pair) {
        u64 slot = find(pair);
        if (keys_[slot] == FREE) {
            if (2 * (totals.size() + 1) > keys_.size()) {
                grow();
                slot = find(pair);
            }
            keys_[slot] = pair;
            numbers_[slot] = static_cast<std::int32_t>(totals.size());
            pairs.push_back(pair);
            totals.push_back(0);
            words.emplace_back();
        }
        return numbers_[slot];
    }

    std::vector<u64> pairs;
    std::vector<std::int64_t> totals;              // occurrences of each pair
    std::vector<std::vector<std::int32_t>> words;  // in which it has come up since it was last queued

  private:
    u64 find(u64 pair) const {
        const u64 mask = keys_.size() - 1;
        u64 slot = (pair ^ pair >> 29) * MULTIPLIER >> 20 & mask;
        while (keys_[slot] != FREE && keys_[slot] != pair) slot = (slot + 1) & mask;
        return slot;
    }

    void grow() {
        keys_.assign(2 * keys_.size(), FREE);
        numbers_.resize(keys_.size());
        for (std::size_t number = 0; number < pairs.size(); ++number) {
            const u64 slot = find(pairs[number]);
            keys_[slot] = pairs[number];
            numbers_[slot] = static_cast<std::int32_t>(number);
        }
    }

    std::vector<u64> keys_;
    std::vector<std::int32_t> numbers_;
};

struct Candidate {
    std::int64_t count;
    u64 pair;
    std::int32_t number;
    std::vector<std::int32_t> words;
};

// the most frequent pair is at the top of the heap, of equally frequent ones the smallest
bool is_below(const Candidate& a, const Candidate& b) {
    return a.count != b.count ? a.count < b.count : a.pair > b.pair;
}

}  // namespace

// Returns the number of merges; `merges` receives left, right and new token of each. `symbols` is overwritten.
extern "C" long mega_train_byte_pairs(const char* text, const std::int64_t* token_ends, long token_count,
                                      std::int32_t* symbols, const std::int64_t* word_ends, const std::int64_t* counts,
                                      long word_count, long vocab_size, std::int32_t** merges) {
    std::vector<std::string> tokens;
    std::unordered_map<std::string, std::int32_t> numbers;
    for (long token = 0; token < token_count; ++token) {
        const std::int64_t start = token ? token_ends[token - 1] : 0;
        tokens.emplace_back(text + start, token_ends[token] - start);
        numbers.emplace(tokens.back(), static_cast<std::int32_t>(token));
    }
    PairTable table;
    std::vector<std::int32_t> changed;  // pairs that came up in a word
    std::vector<std::int64_t> lengths(word_count);
    const auto add = [&](std::int32_t left, std::int32_t right, std::int64_t count, std::int32_t word) {
        const std::int32_t number = table.number(pair_of(left, right));
        table.totals[number] += count;
        if (count < 0) return;
        auto& words = table.words[number];
        if (words.empty()) changed.push_back(number);
        if (words.empty() || words.back() != word) words.push_back(word);
    };
    std::vector<Candidate> heap;
    const auto queue_changed = [&] {
        for (const std::int32_t number : changed) {
            if (table.totals[number] > 0) {
                heap.push_back(
                    {table.totals[number], table.pairs[number], number, std::move(table.words[number])});
                std::push_heap(heap.begin(), heap.end(), is_below);
            }
            table.words[number] = {};
        }
        changed.clear();
    };
    for (long word = 0; word < word_count; ++word) {
        const std::int64_t start = word ? word_ends[word - 1] : 0;
        lengths[word] = word_ends[word] - start;
        for (std::int64_t i = start; i + 1 < word_ends[word]; ++i)
            add(symbols[i], symbols[i + 1], counts[word], static_cast<std::int32_t>(word));
    }
    queue_changed();
    std::vector<std::int32_t> found;
    while (static_cast<long>(numbers.size()) < vocab_size && !heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), is_below);
        Candidate top = std::move(heap.back());
        heap.pop_back();
        if (top.count != table.totals[top.number]) {
            top.count = table.totals[top.number];
            heap.push_back(std::move(top));
            std::push_heap(heap.begin(), heap.end(), is_below);
            continue;
        }
        if (top.count < 1) break;
        const auto left = static_cast<std::int32_t>(top.pair >> 32), right = static_cast<std::int32_t>(top.pair);
        std::string merged = tokens[left] + tokens[right];
        const auto [place, is_new] = numbers.emplace(merged, static_cast<std::int32_t>(tokens.size()));
        const std::int32_t token = place->second;
        if (is_new) tokens.push_back(std::move(merged));
        found.insert(found.end(), {left, right, token});
        for (const std::int32_t word : top.words) {
            std::int32_t* const letters = symbols + (word ? word_ends[word - 1] : 0);
            const std::int64_t length = lengths[word], count = counts[word];
            std::int64_t end = 0;
            for (std::int64_t i = 0; i < length;) {
                if (letters[i] != left || i + 1 == length || letters[i + 1] != right) {
                    letters[end++] = letters[i++];
                    continue;
                }
                if (end > 0) {
                    add(letters[end - 1], left, -count, word);
                    add(letters[end - 1], token, count, word);
                }
                if (i + 2 < length) {
                    add(right, letters[i + 2], -count, word);
                    add(token, letters[i + 2], count, word);
                }
                letters[end++] = token;
                i += 2;
            }
            lengths[word] = end;
        }
        queue_changed();
    }
    *merges = static_cast<std::int32_t*>(std::malloc(std::max<std::size_t>(1, found.size()) * sizeof(std::int32_t)));
    if (*merges == nullptr) return -1;
    std::memcpy(*merges, found.data(), found.size() * sizeof(std::int32_t));
    return static_cast<long>(found.size() / 3);
}

extern "C" void mega_free_merges(std::int32_t* merges) { std::free(merges); }
