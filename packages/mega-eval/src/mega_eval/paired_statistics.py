"""Statistics of two results on the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CHUNK = 1 << 22  # resampled indices in memory


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Under the null hypothesis each of the examples that only one model answers correctly falls to either
    model with probability 1/2 (McNemar 1947, with binomial probabilities instead of chi-squared).

    Args:
        only_first, only_second: examples that only this model answers correctly.
    """
    count = only_first + only_second
    fewer = min(only_first, only_second)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    hits = np.arange(fewer + 1)
    log_tail = log_factorials[count] - log_factorials[hits] - log_factorials[count - hits]
    tail = float(np.exp(log_tail - count * math.log(2)).sum())
    return min(1.0, 2 * tail)


def bootstrap_ratios(numerators: Floats, weights: Floats, *, resamples: int, seed: int) -> Floats:
    """Draw examples with replacement, and return Σ numerators / Σ weights of every draw.

    All columns see the same draws, so that the difference of two columns is that of paired results.

    Args:
        numerators, weights: (examples, columns).

    Returns:
        (resamples, columns).
    """
    count, columns = numerators.shape
    sums = np.concatenate([numerators, weights], axis=1)
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // count)
    ratios = np.empty((resamples, columns))
    for first in range(0, resamples, rows):
        size = min(rows, resamples - first)
        drawn = generator.integers(0, count, (size, count))
        drawn += np.arange(size)[:, None] * count
        multiplicity = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        totals = multiplicity.astype(np.float64) @ sums
        ratios[first : first + size] = totals[:, :columns] / totals[:, columns:]
    return ratios


def percentile_interval(draws: Floats) -> tuple[float, float]:
    """Return the 95 % percentile interval of bootstrap draws (Efron 1979)."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def bootstrap_p_value(differences: Floats) -> float:
    """Return the two-sided p-value of "no difference": the level at which the percentile interval excludes 0.

    At least 2 / (draws + 1), because a finite number of draws cannot show less.
    """
    below = int((differences <= 0).sum())
    above = int((differences >= 0).sum())
    return min(1.0, 2 * (min(below, above) + 1) / (len(differences) + 1))


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return the adjusted p-values (q-values) of Benjamini and Hochberg (1995), in the same order.

    Rejecting all q below a level keeps the expected fraction of false rejections below that level.
    """
    order = np.argsort(p_values)
    ascending = np.asarray(p_values, np.float64)[order]
    raw = ascending * len(ascending) / np.arange(1, len(ascending) + 1)
    adjusted = np.empty(len(ascending))
    adjusted[order] = np.minimum(1.0, np.minimum.accumulate(raw[::-1])[::-1])
    return adjusted.tolist()
