// Scratch memory of a kernel, freed at the end of its scope.

#pragma once

#include <cstdlib>
#include <memory>

struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};

// uninitialised memory for `count` items, aligned to cache lines; null if there is none
template <typename Item>
std::unique_ptr<Item, Freed> room(long count) {
    return std::unique_ptr<Item, Freed>(
        static_cast<Item*>(std::aligned_alloc(64, (count * sizeof(Item) + 63) / 64 * 64 + 64)));
}
