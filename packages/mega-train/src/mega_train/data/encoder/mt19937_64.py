"""The 64-bit Mersenne Twister of the C++ standard library (`std::mt19937_64`), which numpy lacks.

Nishimura, "Tables of 64-bit Mersenne Twisters", ACM TOMACS 10(4), 2000. A number of the new state depends on
numbers at least half a state behind it, so both halves of a state are computed as vectors.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_STATE: Final = 312  # words
_MIDDLE: Final = 156
_SEED_FACTOR: Final = 6364136223846793005
_WORD_MASK: Final = (1 << 64) - 1
_HIGH: Final = np.uint64(0xFFFFFFFF80000000)
_LOW: Final = np.uint64(0x7FFFFFFF)
_TWIST: Final = np.uint64(0xB5026F5AA96619E9)
_TEMPER: Final = (
    (np.right_shift, np.uint64(29), np.uint64(0x5555555555555555)),
    (np.left_shift, np.uint64(17), np.uint64(0x71D67FFFEDA60000)),
    (np.left_shift, np.uint64(37), np.uint64(0xFFF7EEE000000000)),
    (np.right_shift, np.uint64(43), np.uint64(_WORD_MASK)),
)


class MersenneTwister64:
    """The numbers of a `std::mt19937_64` of this seed, in order."""

    def __init__(self, seed: int) -> None:
        words = [seed & _WORD_MASK]
        for i in range(1, _STATE):
            last = words[-1]
            words.append((_SEED_FACTOR * (last ^ (last >> 62)) + i) & _WORD_MASK)
        self._state = np.array(words, np.uint64)
        self._unread = np.empty(0, np.uint64)

    def read(self, count: int) -> Words:
        """Return the next `count` numbers, (count,) uint64."""
        blocks = [self._unread]
        missing = count - len(self._unread)
        while missing > 0:
            self._advance()
            blocks.append(self._state.copy())
            missing -= _STATE
        numbers = np.concatenate(blocks)
        # the numbers of `_unread` are tempered already
        _temper(numbers[len(self._unread) :])
        self._unread = numbers[count:]
        return numbers[:count]

    def _advance(self) -> None:
        """Replace the state by the next one."""
        state = self._state
        mixed = state & _HIGH
        mixed[:-1] |= state[1:] & _LOW
        first = state[_MIDDLE:] ^ _twist(mixed[:_MIDDLE])
        mixed[-1] |= first[0] & _LOW
        self._state = np.concatenate([first, first ^ _twist(mixed[_MIDDLE:])])


def _twist(mixed: Words) -> Words:
    return (mixed >> np.uint64(1)) ^ (mixed & np.uint64(1)) * _TWIST


def _temper(numbers: Words) -> None:
    for shift, bits, mask in _TEMPER:
        numbers ^= shift(numbers, bits) & mask


def shuffle_order(count: int, seed: int) -> NDArray[np.int64]:
    """Return the order of `count` rows that Megatron's C++ helper shuffles with a generator of this seed.

    From the last row to the second, row i is exchanged with row number % (i + 1).
    """
    generator = MersenneTwister64(seed)
    order = list(range(count))
    last = count - 1
    while last > 0:
        size = min(last, 1 << 16)
        rows = np.arange(last, last - size, -1, dtype=np.uint64)
        partners = generator.read(size) % (rows + np.uint64(1))
        for i, j in zip(range(last, last - size, -1), partners.tolist(), strict=True):
            order[i], order[j] = order[j], order[i]
        last -= size
    return np.array(order, np.int64)
