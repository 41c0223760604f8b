"""Philox4x32-10: a random generator that computes the numbers of a counter and a key, without any state.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11. Names in the code are the
paper's. Integers only, so the numbers are the same on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS: Final = 10
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return four random words of 32 bits for every row.

    Args:
        counter: (R, 4).
        key: (R, 2).

    Returns:
        (R, 4).
    """
    # 64-bit arrays hold the products of two words; every word stays below 2**32
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def draw_uniforms(seeds: ArrayLike, sequences: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, sequence, position), with 53 random bits.

    Args:
        seeds: (R,) integers from 0 to 2**64 - 1: the key.
        sequences, positions: (R,) integers from 0 to 2**32 - 1: the counter.
    """
    seed = np.asarray(seeds, np.uint64)
    key = np.stack([seed & _LOW, seed >> _32], axis=1).astype(np.uint32)
    counter = np.zeros((len(seed), 4), np.uint32)
    counter[:, 0] = np.asarray(positions, np.uint32)
    counter[:, 1] = np.asarray(sequences, np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits * 2.0**-53
