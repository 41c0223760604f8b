"""Turn logits into integer weights, cut them by top-k, top-p and min-p, and draw one.

A weight is a word's probability relative to the most probable one, in steps of 2**-33. Sums of such integers
are exact in float64, in any order. So the nucleus and the drawn word depend on nothing but the row: not on
the order of a summation, the number of threads or the other rows of a batch. The price: a word 2**34 times
less probable than the best one is never drawn.

Arrays are (n,): the words of a row, or those that top-k kept, in the order of their ids.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]

# weight of the most probable word; 2**20 words of this weight still have an exact sum
MAX_WEIGHT: Final = 2.0**33
MAX_WORDS: Final = 2**20
# a lower temperature is 0 in float32, and dividing by it would turn the best word's logit into 0 / 0
MIN_TEMPERATURE: Final = float(np.finfo(np.float32).tiny)
_BLOCK: Final = 256
# a bucket of the histogram holds weights of equal exponent and equal 5 first bits of the mantissa
_BUCKET_SHIFT: Final = 18
# words of smaller weights seldom belong to the nucleus of a peaked distribution
_HEAVY_WEIGHT: Final = np.float32(MAX_WEIGHT / 2**14)


def top_k_ids(logits: Row, k: int) -> NDArray[np.intp]:
    """Return the ids of the k largest logits, in ascending order; ties with the last are included."""
    floor = np.float32(-np.inf)
    if len(logits) > 4 * k:
        # the k-th largest of the blocks' maxima is a lower bound of the k-th largest logit
        size = max(1, min(_BLOCK, len(logits) // (4 * k)))
        whole = len(logits) // size * size
        maxima = logits[:whole].reshape(-1, size).max(1)
        floor = np.partition(maxima, len(maxima) - k)[-k]
    ids = np.flatnonzero(logits >= floor)
    if len(ids) <= k:
        return ids
    values = logits[ids]
    largest_ids: NDArray[np.intp] = ids[values >= np.partition(values, len(values) - k)[-k]]
    return largest_ids


def compute_weights(logits: Row, temperature: float, out: Row) -> Row:
    """Write the weights of exp(logits / temperature) to `out` and return it.

    Args:
        logits: the largest is finite, or several are infinite: those share the probability.
    """
    largest = logits.max()
    if largest == np.inf:
        np.multiply(logits == np.inf, np.float32(MAX_WEIGHT), out=out)
        return out
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(logits, largest, out=out)
        if temperature != 1.0:
            np.divide(out, np.float32(max(temperature, MIN_TEMPERATURE)), out=out)
        np.exp(out, out=out)
    np.multiply(out, np.float32(MAX_WEIGHT), out=out)
    np.rint(out, out=out)
    return out


def heavy_ids(weights: Row, p: float) -> tuple[NDArray[np.intp], float] | None:
    """Return the ids of a few words that contain the nucleus, and the sum of all weights; None if many do.

    In a peaked distribution, as of a trained model, they are a small part of the vocabulary.
    """
    is_heavy = weights > _HEAVY_WEIGHT
    if np.count_nonzero(is_heavy) > len(weights) // 4:
        return None
    ids = np.flatnonzero(is_heavy)
    total = float(weights.sum(dtype=np.float64))
    return (ids, total) if weights[ids].sum(dtype=np.float64) > p * total else None


def cut_nucleus(weights: Row, p: float, total: float | None = None) -> None:
    """Set the weights outside the nucleus to 0 (arXiv:1904.09751).

    Words are taken by weight, ties by id, until their sum exceeds p of the total; the word that crosses it is
    kept, and the most probable one always is.

    Args:
        total: sum of the weights of all words, if `weights` has only some.
    """
    # the bits of positive floats have the order of their values, so no sort of the vocabulary is needed:
    # a histogram finds the bucket in which the sum crosses the target, and only this bucket is sorted
    buckets = weights.view(np.int32) >> _BUCKET_SHIFT
    sums = np.cumsum(np.bincount(buckets, weights=weights)[::-1])
    target = p * float(sums[-1] if total is None else total)
    crossing = int(np.searchsorted(sums, target, side="right"))
    if crossing == len(sums):  # p rounds to 1
        return
    bucket = len(sums) - 1 - crossing
    ids = np.flatnonzero(buckets == bucket)
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    above = sums[crossing - 1] if crossing else 0.0
    last = int(np.searchsorted(above + np.cumsum(weights[ids], dtype=np.float64), target, side="right"))
    np.copyto(weights, np.float32(0.0), where=buckets < bucket)
    weights[ids[last + 1 :]] = 0.0


def cut_min_p(weights: Row, min_p: float) -> None:
    """Set weights below `min_p` times the largest to 0 (arXiv:2407.01082)."""
    np.copyto(weights, np.float32(0.0), where=weights < np.float32(min_p * MAX_WEIGHT))


def draw_index(weights: Row, uniform: float) -> int:
    """Return the first index at which the cumulative weight exceeds uniform · sum.

    Args:
        weights: not all 0.
        uniform: in [0, 1).
    """
    if len(weights) <= 4 * _BLOCK:
        sums = np.cumsum(weights, dtype=np.float64)
        return int(np.searchsorted(sums, _threshold(sums, uniform), side="right"))
    whole = len(weights) // _BLOCK * _BLOCK
    block_sums = weights[:whole].reshape(-1, _BLOCK).sum(1, dtype=np.float64)
    sums = np.cumsum(np.append(block_sums, weights[whole:].sum(dtype=np.float64)))
    threshold = _threshold(sums, uniform)
    block = int(np.searchsorted(sums, threshold, side="right"))
    before = sums[block - 1] if block else 0.0
    inner = before + np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(inner, threshold, side="right"))


def _threshold(sums: NDArray[np.float64], uniform: float) -> float:
    # the product may round up to the sum itself, which no cumulative weight exceeds
    return float(min(np.floor(uniform * sums[-1]), sums[-1] - 1.0))
