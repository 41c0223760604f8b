"""Mapping from samples to consecutive sentences of a document, equal to Megatron's `build_mapping`.

A row is the first sentence of a sample, one past its last, and the length in tokens to which the sample is
truncated. Rows follow the documents; a sample ends once its sentences have the target length. Most targets
are the longest length; with the probability of a short sample a target is shorter. Every sample takes one
draw of a `std::mt19937`, whose sequence continues over documents and epochs, so the rows of a document depend
on those before it. `std::mt19937_64` shuffles the rows of all epochs.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mega_train.data.encoder.mt19937_64 import shuffle_order

LONG_SENTENCE = 512  # tokens; a document with a longer sentence is left out, unless it has only one sentence
MIN_TARGET = 2  # tokens of the shortest sample

_MAX_BLOCK = 1 << 16  # targets drawn at a time
_MAX_UINT32 = np.iinfo(np.uint32).max


@dataclass(frozen=True, slots=True)
class MappingRule:
    """The rule by which sentences become samples.

    Attributes:
        target: longest length of a sample in tokens, without special tokens; at least MIN_TARGET.
        min_sentences: of a sample.
        short_probability: of a sample whose target is shorter.
        seed: of the targets and of the order.
    """

    target: int
    min_sentences: int
    short_probability: float
    seed: int


def build_mapping(
    documents: NDArray[np.int64], lengths: NDArray[np.int32], rule: MappingRule, samples: int | None
) -> NDArray[np.unsignedinteger]:
    """Build the shuffled rows.

    Args:
        documents: (D + 1,) first sentence of each document, and one past the last sentence.
        lengths: (N,) tokens of every sentence of the dataset.
        samples: wanted; epochs are added until there are as many or more. None: one epoch.

    Returns:
        (R, 3) uint32: first sentence, last sentence + 1, target; uint64 if there are 2^32 sentences. Empty
        if no document has enough sentences.
    """
    first, stop = int(documents[0]), int(documents[-1])
    begins, ends = eligible_documents(documents, lengths, rule.min_sentences)
    before = np.zeros(stop - first + 1, np.int64)
    np.cumsum(lengths[first:stop], dtype=np.int64, out=before[1:])
    # reading a memoryview is several times as fast as reading numbers of an array
    tokens_before = before.data
    bounds = (begins - first).data, (ends - first).data
    draws = _draw_targets(rule)
    rows = array("q")
    while len(begins):
        for begin, end in zip(*bounds, strict=True):
            _append_rows(rows, tokens_before, begin, end, draws, rule.min_sentences)
        if samples is None or len(rows) // 3 >= samples:
            break
    mapping = np.frombuffer(rows, np.int64).reshape(-1, 3) if rows else np.empty((0, 3), np.int64)
    mapping = mapping[shuffle_order(len(mapping), rule.seed + 1)] + (first, first, 0)
    return mapping.astype(np.uint32 if len(lengths) <= _MAX_UINT32 else np.uint64)


def eligible_documents(
    documents: NDArray[np.int64], lengths: NDArray[np.int32], min_sentences: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bounds of the documents with enough sentences and without a long one."""
    first = documents[0]
    long_before = np.zeros(documents[-1] - first + 1, np.int64)
    np.cumsum(lengths[first : documents[-1]] > LONG_SENTENCE, out=long_before[1:])
    begins, ends = documents[:-1], documents[1:]
    sentences = ends - begins
    has_long = (long_before[ends - first] > long_before[begins - first]) & (sentences > 1)
    # a document without sentences has no sample, whatever the minimum
    eligible = (sentences >= max(1, min_sentences)) & ~has_long
    return begins[eligible], ends[eligible]


def _append_rows(
    rows: array[int],
    before: memoryview[int],
    begin: int,
    end: int,
    draws: Iterator[int],
    min_sentences: int,
) -> None:
    """Append the rows of a document. It draws a target for each, and another at its end, as Megatron does."""
    target = next(draws)
    while begin < end:
        stop = bisect_left(before, before[begin] + target, begin + min_sentences, end)
        if stop > end - 2:  # a last sentence does not remain alone
            stop = end
        rows.extend((begin, stop, target))
        begin = stop
        target = next(draws)


def _draw_targets(rule: MappingRule) -> Iterator[int]:
    """Yield the targets. Without short samples there are no draws."""
    # C++ rounds halves away from zero
    ratio = math.floor(1.0 / rule.short_probability + 0.5) if rule.short_probability else 0
    rng = np.random.RandomState(rule.seed)
    block = 64
    while True:
        if not ratio:
            yield rule.target
            continue
        numbers = rng.randint(0, 1 << 32, block, np.uint32)
        block = min(2 * block, _MAX_BLOCK)
        short = MIN_TARGET + numbers % np.uint32(rule.target - 1)
        yield from np.where(numbers % np.uint32(ratio) == 0, short, rule.target).tolist()
