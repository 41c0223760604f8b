// Split a text into numbered words, and measure its repeated n-grams, with the results of words.py and repetition.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using u64 = std::uint64_t;

constexpr u64 MULTIPLIER = 0x9E3779B97F4A7C15;
constexpr long NONE = -1, MAX_TOP_SIZE = 4, MAX_SIZE = 10;

u64 mix(u64 value) {
    value *= MULTIPLIER;
    return value ^ value >> 32;
}

// str.isspace of one character
bool is_space(std::uint32_t code) {
    if (code <= 0x20) return code == 0x20 || (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x1F);
    if (code < 0x85) return false;
    return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
           code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

// the number of slots of a hash table that is at most half full, less one
u64 slot_mask(long items) {
    u64 slots = 64;
    while (slots < 2 * static_cast<u64>(items)) slots *= 2;
    return slots - 1;
}

template <typename Code>
long split_words(const Code* codes, long count, long* numbers, long* starts, long* ends, std::uint8_t* has_letter,
                 long* distinct) {
    std::vector<std::uint32_t> slots(1024, 0);  // number of a distinct word plus 1; 0 is free
    std::vector<u64> hashes;                    // of the distinct words
    long words = 0;
    for (long i = 0; i < count;) {
        while (i < count && is_space(codes[i])) ++i;
        if (i == count) break;
        const long start = i;
        u64 hash = 0;
        bool is_letter = false;
        for (; i < count && !is_space(codes[i]); ++i) {
            hash = (hash + codes[i] + 1) * MULTIPLIER;
            is_letter |= static_cast<std::uint32_t>(codes[i] | 0x20) - 'a' < 26;
        }
        hash ^= hash >> 32;
        const std::size_t bytes = (i - start) * sizeof(Code);
        u64 mask = slots.size() - 1, slot = hash & mask;
        long number = NONE;
        for (; slots[slot] != 0; slot = (slot + 1) & mask) {
            const long known = slots[slot] - 1;
            if (hashes[known] == hash && ends[known] - starts[known] == i - start &&
                std::memcmp(codes + starts[known], codes + start, bytes) == 0) {
                number = known;
                break;
            }
        }
        if (number == NONE) {
            number = hashes.size();
            hashes.push_back(hash);
            starts[number] = start;
            ends[number] = i;
            has_letter[number] = is_letter;
            slots[slot] = number + 1;
            if (2 * hashes.size() > slots.size()) {
                slots.assign(2 * slots.size(), 0);
                mask = slots.size() - 1;
                for (std::size_t known = 0; known < hashes.size(); ++known) {
                    slot = hashes[known] & mask;
                    while (slots[slot] != 0) slot = (slot + 1) & mask;
                    slots[slot] = known + 1;
                }
            }
        }
        numbers[words++] = number;
    }
    *distinct = hashes.size();
    return words;
}

struct Class {  // of equal n-grams
    u64 key;
    long first, count;
};

}  // namespace

extern "C" {

// The arrays have an element for every second character. `has_letter` says of a distinct word whether it contains an
// ASCII letter. Returns the words.
long mega_split_words_u8(const std::uint8_t* codes, long count, long* numbers, long* starts, long* ends,
                         std::uint8_t* has_letter, long* distinct) {
    return split_words(codes, count, numbers, starts, ends, has_letter, distinct);
}

long mega_split_words_u32(const std::uint32_t* codes, long count, long* numbers, long* starts, long* ends,
                          std::uint8_t* has_letter, long* distinct) {
    return split_words(codes, count, numbers, starts, ends, has_letter, distinct);
}

// For n from 2 to 10, while an n-gram occurs more than once: up to 4 the characters of all occurrences of the most
// frequent n-gram, the first of several; from 5 the characters of words in n-grams that occurred before. Returns how
// many sizes there are.
long mega_repeated_characters(const long* numbers, const long* lengths, long count, long* characters) {
    std::vector<long> positions(count), classes(numbers, numbers + count), slots_of(count);
    for (long i = 0; i < count; ++i) positions[i] = i;
    std::vector<Class> slots;
    for (long size = 2; size <= MAX_SIZE; ++size) {
        // an n-gram can occur again only where both (n-1)-grams in it do
        long candidates = 0;
        for (std::size_t i = 0; i + 1 < positions.size(); ++i) {
            if (positions[i + 1] != positions[i] + 1) continue;
            positions[candidates] = positions[i];
            classes[candidates++] = classes[i];
        }
        const u64 mask = slot_mask(candidates);
        slots.assign(mask + 1, {0, NONE, 0});
        long most = 0;
        for (long i = 0; i < candidates; ++i) {
            const u64 key = static_cast<u64>(classes[i]) << 32 | static_cast<u64>(numbers[positions[i] + size - 1]);
            u64 slot = mix(key) & mask;
            while (slots[slot].count != 0 && slots[slot].key != key) slot = (slot + 1) & mask;
            if (slots[slot].count++ == 0) {
                slots[slot].key = key;
                slots[slot].first = i;
            }
            slots_of[i] = slot;
            most = std::max(most, slots[slot].count);
        }
        if (most < 2) return size - 2;
        long& sum = characters[size - 2];
        sum = 0;
        long repeated = 0, covered = 0;  // words before `covered` are counted
        bool is_top = size <= MAX_TOP_SIZE;
        for (long i = 0; i < candidates; ++i) {
            const Class& same = slots[slots_of[i]];
            if (same.count < 2) continue;
            const long position = positions[i];
            if (is_top && same.count == most) {
                for (long word = position; word < position + size; ++word) sum += most * lengths[word];
                is_top = false;  // the first one counts
            } else if (size > MAX_TOP_SIZE && same.first != i) {
                for (long word = std::max(covered, position); word < position + size; ++word) sum += lengths[word];
                covered = position + size;
            }
            positions[repeated] = position;
            classes[repeated++] = slots_of[i];
        }
        positions.resize(repeated);
        classes.resize(repeated);
    }
    return MAX_SIZE - 1;
}

}  // extern "C"
