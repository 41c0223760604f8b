"""Cut the words outside a row's nucleus without a sort of the vocabulary, compiled by numba.

Weights are integers up to 2**33 in float32, so that sums in float64 are exact in any order, and the result is
bitwise that of any other algorithm. The bits of positive floats have the order of their values: three
histograms of bits, of which each refines one bucket of the former, find the smallest weight of the nucleus.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import numpy as np
from numba import njit

_SHIFT = 18  # bits below those of the first histogram
_FINE_SHIFT = 9
_FINE_BUCKETS = 1 << _FINE_SHIFT
_BUCKETS = 161 << (23 - _SHIFT)  # 2**33 has the exponent 160
_WAYS = 4  # sums of neighbours go to different tables, so that no addition waits for another


@njit(nogil=True, cache=True)
def _find_bucket(sums, above, target):
    """Return the highest bucket with which the sum exceeds the target, and the sum of the buckets above it.

    The bucket is -1 if the sum of all does not exceed the target.
    """
    bucket = len(sums) - 1
    while bucket >= 0 and above + sums[bucket] <= target:
        above += sums[bucket]
        bucket -= 1
    return bucket, above


@njit(nogil=True, cache=True)
def cut_nucleus(weights, p):
    """Set the weights outside the nucleus to 0, as `mega_serve.execution.token_weights.cut_nucleus`.

    Args:
        weights: (V,) float32, integers from 0 to 2**33.
        p: a word belongs to the nucleus if the weights before it do not exceed p of the total.
    """
    bits = weights.view(np.int32)
    count = len(weights)
    tables = np.zeros((_WAYS, _BUCKETS + 1), np.float64)
    for i in range(count):
        tables[i % _WAYS, bits[i] >> _SHIFT] += np.float64(weights[i])
    sums = tables[0]
    for way in range(1, _WAYS):
        for bucket in range(len(sums)):
            sums[bucket] += tables[way, bucket]
    target = p * np.sum(sums)
    bucket, above = _find_bucket(sums, 0.0, target)
    if bucket < 0:  # p rounds to 1
        return
    floor = bucket << _SHIFT
    candidates = np.empty(count, np.int32)
    number = 0
    for i in range(count):
        candidates[number] = i
        number += (bits[i] >> _SHIFT) == bucket
    for i in range(count):
        weights[i] = weights[i] if bits[i] >= floor else np.float32(0.0)
    candidates = candidates[:number]
    sums = np.zeros(_FINE_BUCKETS, np.float64)
    for i in candidates:
        sums[(bits[i] >> _FINE_SHIFT) & (_FINE_BUCKETS - 1)] += np.float64(weights[i])
    fine, above = _find_bucket(sums, above, target)
    floor |= fine << _FINE_SHIFT
    sums[:] = 0.0
    for i in candidates:
        if bits[i] >> _FINE_SHIFT == floor >> _FINE_SHIFT:
            sums[bits[i] & (_FINE_BUCKETS - 1)] += np.float64(weights[i])
    fine, above = _find_bucket(sums, above, target)
    smallest = floor | fine
    for i in candidates:  # of equal weights, those of the lowest ids
        if bits[i] < smallest or (bits[i] == smallest and above > target):
            weights[i] = np.float32(0.0)
        elif bits[i] == smallest:
            above += np.float64(weights[i])
