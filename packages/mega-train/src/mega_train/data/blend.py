"""Blend several datasets: choose the dataset of each sample, exactly as Megatron does.

Sample i comes from the dataset that lags furthest behind its share: the k with the largest w_k · max(i, 1)
- n_k in doubles, the lowest k among equals, where n_k samples came from k before. Each choice changes n, so
the rule is a loop (`blend_reference`). Here segments of the loop run in parallel instead, one in every column
of an array. A column starts at a guess of n, and the error of the guess decays: two runs from different n
never diverge (where they choose p and q, n_p - n'_p <= n_q - n'_q, so the step does not add to the sum of
squares of n - n'). A column whose start differs from the end of the previous column is run again from there.
So the result is bit for bit that of the loop, whatever the guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mega_train.config.data import BlendRule

Floats = NDArray[np.float64]
BlendBlock = tuple[NDArray[np.int16], NDArray[np.int64]]

MAX_DATASETS = np.iinfo(np.int16).max  # the dataset of a sample is stored as int16
SURPLUS_FACTOR = 1.005  # samples built of each dataset, relative to its share

_TABLE_CELLS = 1 << 16  # numbers in a table of columns, which must fit a core's cache
_LOOP_DATASETS = 512  # datasets from which on the loop is as fast as columns


def normalize(weights: Sequence[float] | Floats) -> Floats:
    """Scale weights to a sum of 1, in float64 as Megatron does."""
    array = np.array(weights, np.float64)
    return array / np.sum(array)


def dataset_samples(weight: float, samples: int, rule: BlendRule) -> tuple[int, int]:
    """Return how many samples a dataset adds to a blend of `samples`, and how many to build for it.

    "surplus" (Megatron core through 0.12) adds all that are built; "exact" (since 0.13) only its share.
    """
    if rule == "surplus":
        count = math.ceil(samples * weight * SURPLUS_FACTOR)
        return count, count
    added = math.ceil(samples * weight)
    return added, math.ceil(added * SURPLUS_FACTOR)


def blend_blocks(weights: Floats, size: int, sizes: NDArray[np.int64] | None = None) -> Iterator[BlendBlock]:
    """Yield the dataset of each of `size` samples, and its sample number in that dataset, in blocks.

    Args:
        weights: of each dataset; they add up to 1.
        sizes: samples of each dataset, 1 or more; an exhausted dataset is not chosen again. None does not
            limit them.
    """
    assert 0 < len(weights) <= MAX_DATASETS
    warmup = 8 * len(weights) + 64
    max_steps = max(4096, 4 * warmup)
    columns = max(8, min(2048, _TABLE_CELLS // len(weights)))
    counts = np.zeros(len(weights))
    first = 0
    while (remaining := size - first) >= 8 * warmup and len(weights) <= _LOOP_DATASETS:
        columns = min(columns, remaining // (4 * warmup))
        steps = min(max_steps, remaining // columns)
        yield _blend_columns(weights, first, steps, columns, warmup, counts, sizes)
        first += steps * columns
    while remaining := size - first:
        steps = min(remaining, 1 << 20)
        yield blend_reference(weights, first, steps, counts, sizes)
        first += steps


def blend_reference(
    weights: Floats, first: int, steps: int, counts: Floats, sizes: NDArray[np.int64] | None = None
) -> BlendBlock:
    """Apply the rule sample by sample, from sample `first` on; updates `counts`."""
    corpus, number = np.empty(steps, np.int16), np.empty(steps, np.int64)
    for step in range(steps):
        lag = weights * float(max(first + step, 1)) - counts
        if sizes is not None:
            lag[counts >= sizes] = -math.inf
        best = int(lag.argmax())
        corpus[step], number[step] = best, counts[best]
        counts[best] += 1
    return corpus, number


def _blend_columns(
    weights: Floats,
    first: int,
    steps: int,
    columns: int,
    warmup: int,
    counts: Floats,
    sizes: NDArray[np.int64] | None,
) -> BlendBlock:
    """Choose `steps` · `columns` samples from `first` on, column after column; updates `counts`."""
    first_samples = first + steps * np.arange(columns, dtype=np.float64)
    start_counts = np.empty((len(weights), columns))
    guess = _guess_counts(weights, first_samples[1:] - warmup, sizes)
    _run_columns(weights, first_samples[1:] - warmup, warmup, guess, sizes)
    start_counts[:, 0], start_counts[:, 1:] = counts, guess
    corpus, number = np.empty((columns, steps), np.int16), np.empty((columns, steps), np.int64)
    end_counts = np.empty_like(start_counts)
    stale = np.arange(columns)
    while len(stale):
        column_counts = np.ascontiguousarray(start_counts[:, stale])
        chosen, numbers = _run_columns(weights, first_samples[stale], steps, column_counts, sizes)
        corpus[stale], number[stale], end_counts[:, stale] = chosen.T, numbers.T, column_counts
        stale = np.flatnonzero((start_counts[:, 1:] != end_counts[:, :-1]).any(axis=0)) + 1
        start_counts[:, stale] = end_counts[:, stale - 1]
    counts[:] = end_counts[:, -1]
    return corpus.reshape(-1), number.reshape(-1)


def _guess_counts(weights: Floats, first_samples: Floats, sizes: NDArray[np.int64] | None) -> Floats:
    """Guess the counts, (datasets, columns), of the loop at `first_samples`, to which each column adds up."""
    guess = np.floor(weights[:, None] * first_samples)
    rank = np.empty(len(weights))
    rank[np.argsort(-weights, kind="stable")] = np.arange(len(weights))
    guess += rank[:, None] < first_samples - guess.sum(axis=0)
    return guess if sizes is None else np.minimum(guess, sizes[:, None])


def _run_columns(
    weights: Floats, first: Floats, steps: int, counts: Floats, sizes: NDArray[np.int64] | None
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Apply the rule in every column from its own first sample; updates `counts`, (datasets, columns).

    Returns:
        (steps, columns) the chosen dataset, and its count before.
    """
    corpora, columns = counts.shape
    small = np.uint8 if corpora < np.iinfo(np.uint8).max else np.uint16
    name = np.arange(corpora, dtype=small)[:, None]
    x = np.maximum(first, 1)
    weight = np.repeat(weights[:, None], columns, axis=1)  # twice as fast as broadcasting a column
    lag = np.empty_like(counts)
    largest = np.empty(columns)
    mask, candidate = np.empty(counts.shape, np.bool_), np.empty(counts.shape, small)
    best = np.empty(columns, small)
    cell = np.empty(columns, np.intp)
    column = np.arange(columns)
    flat = counts.reshape(-1)
    chosen = np.empty((steps, columns), np.int16)
    numbers = np.empty((steps, columns))
    assert np.shares_memory(flat, counts)
    for step in range(steps):
        np.multiply(weight, x, out=lag)
        np.subtract(lag, counts, out=lag)
        if sizes is not None:
            np.copyto(lag, -math.inf, where=np.greater_equal(counts, sizes[:, None], out=mask))
        np.max(lag, axis=0, out=largest)
        np.equal(lag, largest, out=mask)
        # the number of a dataset that lags most, else the largest integer: the minimum is the choice
        np.subtract(mask.view(np.uint8), 1, out=candidate, dtype=small, casting="unsafe")
        np.bitwise_or(candidate, name, out=candidate)
        np.min(candidate, axis=0, out=best)
        chosen[step] = best
        np.multiply(best, columns, out=cell, dtype=np.intp)
        np.add(cell, column, out=cell)
        np.take(flat, cell, out=numbers[step], mode="clip")
        flat[cell] = numbers[step] + 1
        np.maximum(first + (step + 1), 1, out=x)
    return chosen, numbers
