// Word hashes, shingle keys and smallest hashes, equal to those of reference.py in every bit.

#include <cstdint>
#include <vector>

namespace {

using u64 = std::uint64_t;

constexpr std::uint8_t LETTER = 1, DIGIT = 2, DROPPED = 3;  // classes of characters, see reference.py
constexpr u64 MULTIPLIER = 0x9E3779B97F4A7C15, FIRST = 0xBF58476D1CE4E5B9, SECOND = 0x94D049BB133111EB,
              MIX = 0xD6E8FEB86659FD93, EMPTY = ~u64{0};

// Letters and white space, which are most characters, take no branch: a word's end cannot be predicted.
template <typename Code>
long hash_words(const Code* codes, long count, const long* ends, const std::uint8_t* classes, long table_size,
                const u64* powers, long powers_size, u64* words, long* documents) {
    const u64 beyond = table_size - 1;
    const long power_mask = powers_size - 1;
    const auto value = [](u64 code) {
        code *= FIRST;
        return code ^ code >> 29;
    };
    long total = 0, document = 0, place = 0, in_word = 0;
    u64 sum = 0;
    bool after_digit = false;
    for (long i = 0; i < count; ++i) {
        const u64 code = codes[i];
        const std::uint8_t kind = classes[sizeof(Code) > 1 && code > beyond ? beyond : code];
        while (i >= ends[document]) ++document;
        if (kind <= LETTER) {
            const long is_letter = kind == LETTER;
            after_digit = false;
            total += in_word & ~is_letter;
            sum = (sum + value(code) * powers[place & power_mask]) & -static_cast<u64>(is_letter);
            place = (place + 1) & -is_letter;
            in_word = is_letter;
        } else if (kind == DROPPED) {
            after_digit = false;
            continue;
        } else if (kind == DIGIT) {
            if (after_digit) continue;  // a number counts as one digit
            after_digit = true;
            sum += value('0') * powers[place & power_mask];
            ++place;
            in_word = 1;
        } else {  // an ideograph is a word
            after_digit = false;
            total += in_word;
            words[total] = value(code) * powers[0];
            documents[total] = document;
            ++total;
            sum = 0;
            place = 0;
            in_word = 0;
            continue;
        }
        words[total] = sum;  // of a word that has not ended, or of none
        documents[total] = document;
    }
    total += in_word;
    for (long i = 0; i < total; ++i) words[i] = (words[i] ^ words[i] >> 31) * SECOND;
    return total;
}

}  // namespace

extern "C" {

// `words` and `documents` have an element for each character and one more; returns the number of words. `classes` has at
// least 256 elements, and the last of `ends` is `count`.
long mega_hash_words_u8(const std::uint8_t* codes, long count, const long* ends, const std::uint8_t* classes,
                        long table_size, const u64* powers, long powers_size, u64* words, long* documents) {
    return hash_words(codes, count, ends, classes, table_size, powers, powers_size, words, documents);
}

long mega_hash_words_u32(const std::uint32_t* codes, long count, const long* ends, const std::uint8_t* classes,
                         long table_size, const u64* powers, long powers_size, u64* words, long* documents) {
    return hash_words(codes, count, ends, classes, table_size, powers, powers_size, words, documents);
}

// A shingle of `size` units begins at each of `count` units, if the unit `last` places on is of the same document.
long mega_shingle_keys(const long* documents, const u64* units, long count, long size, long last, u64 seed,
                       long hash_bits, u64* keys) {
    long total = 0;
    for (long i = 0; i < count; ++i) {
        u64 hash = units[i] + seed;
        for (long offset = 1; offset < size; ++offset) hash = hash * MULTIPLIER + units[i + offset];
        hash *= FIRST;
        hash ^= hash >> 32;
        hash *= SECOND;
        keys[total] = static_cast<u64>(documents[i]) << hash_bits | hash >> (64 - hash_bits);
        total += documents[i] == documents[i + last];
    }
    return total;
}

void mega_update_smallest(const u64* keys, long count, long bins, long hash_bits, u64* smallest) {
    const u64 mask = (u64{1} << hash_bits) - 1;
    for (long i = 0; i < count; ++i) {
        const u64 hash = keys[i] & mask;
        u64& value = smallest[(keys[i] >> hash_bits) * bins + (hash * bins >> hash_bits)];
        if (hash < value) value = hash;
    }
}

// Fill each empty bin of a document with the value of a full one, see reference.py.
void mega_fill_empty(u64* table, long documents, long bins) {
    std::vector<long> empty;
    std::vector<u64> values;
    for (u64* row = table; row != table + documents * bins; row += bins) {
        empty.clear();
        for (long bin = 0; bin < bins; ++bin)
            if (row[bin] == EMPTY) empty.push_back(bin);
        if (empty.size() == static_cast<std::size_t>(bins)) continue;
        values.resize(empty.size());  // written at the end: until then `row` says which bins were full
        for (std::size_t i = 0; i < empty.size(); ++i) {
            u64 start = empty[i], source;
            do {
                start += MULTIPLIER;
                u64 drawn = start * MIX;
                drawn ^= drawn >> 32;
                drawn *= MULTIPLIER;
                source = (drawn >> 32) * bins >> 32;
            } while (row[source] == EMPTY);
            values[i] = row[source];
        }
        for (std::size_t i = 0; i < empty.size(); ++i) row[empty[i]] = values[i];
    }
}

}  // extern "C"
