"""Train byte-pair merges on counted words, with the merges of the trainer of the `tokenizers` library.

The library cannot be given counts. Its trainer queues each pair of tokens with its count and the words in
which it has come up since it was last queued. The queue's order is by count, then by the numbers of the two
tokens. A pair that is queued twice, as its token can be formed in two ways, has the rank of its last merge.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mega_data.tokenizer_counts.kernels import BytePairKernel
from mega_schema.cpp_library import CompileError

log = logging.getLogger("mega.data")

Merge = tuple[int, int, int]  # left token, right token, merged token


def train_byte_pairs(
    tokens: list[str],
    symbols: NDArray[np.int32],
    ends: NDArray[np.int64],
    counts: NDArray[np.int64],
    vocab_size: int,
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges by rank, see `train_reference`."""
    kernel = _load_kernel()
    train = train_reference if kernel is None else kernel.train
    vocab = {token: number for number, token in enumerate(tokens)}
    names = [*tokens]
    ranks = dict[tuple[str, str], None]()
    for left, right, token in train(tokens, symbols, ends, counts, vocab_size):
        if token == len(names):
            names.append(names[left] + names[right])
            vocab[names[token]] = token
        pair = names[left], names[right]
        ranks.pop(pair, None)
        ranks[pair] = None
    return vocab, [*ranks]


def train_reference(
    tokens: list[str],
    symbols: NDArray[np.int32],
    ends: NDArray[np.int64],
    counts: NDArray[np.int64],
    vocab_size: int,
) -> list[Merge]:
    """Merge the most frequent pair of tokens until there are `vocab_size` tokens or no pairs.

    Args:
        tokens: the first tokens, all different.
        symbols: (letters,) token of each letter of the words.
        ends: (words,) end of each word in `symbols`.
        counts: (words,) occurrences of each word.

    Returns:
        The merges in their order; some may give a token that exists.
    """
    names = [*tokens]
    numbers = {name: number for number, name in enumerate(names)}
    words = [part.tolist() for part in np.split(symbols, ends[:-1])] if len(ends) else []
    weights: list[int] = counts.tolist()
    totals = Counter[tuple[int, int]]()
    changed = dict[tuple[int, int], dict[int, None]]()  # pair -> words in which it came up
    queue = list[tuple[int, tuple[int, int], int, list[int]]]()

    def add(left: int, right: int, count: int, word: int) -> None:
        totals[left, right] += count
        if count > 0:
            changed.setdefault((left, right), {})[word] = None

    def queue_changed() -> None:
        for pair, places in changed.items():
            if totals[pair] > 0:
                heapq.heappush(queue, (-totals[pair], pair, len(merges), [*places]))
        changed.clear()

    merges = list[Merge]()
    for word, letters in enumerate(words):
        for left, right in zip(letters, letters[1:], strict=False):
            add(left, right, weights[word], word)
    queue_changed()
    while len(numbers) < vocab_size and queue:
        count, pair, order, places = heapq.heappop(queue)
        if -count != totals[pair]:
            heapq.heappush(queue, (-totals[pair], pair, order, places))
            continue
        if not count:
            break
        left, right = pair
        name = names[left] + names[right]
        token = numbers.setdefault(name, len(names))
        if token == len(names):
            names.append(name)
        merges.append((left, right, token))
        for word in places:
            words[word], changes = _merge_pair(words[word], left, right, token)
            for pair, change in changes:
                add(*pair, change * weights[word], word)
        queue_changed()
    return merges


def _merge_pair(
    letters: list[int], left: int, right: int, token: int
) -> tuple[list[int], list[tuple[tuple[int, int], int]]]:
    """Return a word in which `token` replaces a pair, and the changes of the number of its other pairs."""
    merged = list[int]()
    changes = list[tuple[tuple[int, int], int]]()
    i = 0
    while i < len(letters):
        if letters[i : i + 2] != [left, right]:
            merged.append(letters[i])
            i += 1
            continue
        if merged:
            changes += [((merged[-1], left), -1), ((merged[-1], token), 1)]
        if i + 2 < len(letters):
            changes += [((right, letters[i + 2]), -1), ((token, letters[i + 2]), 1)]
        merged.append(token)
        i += 2
    return merged, changes


@cache
def _load_kernel() -> BytePairKernel | None:
    try:
        return BytePairKernel()
    except CompileError as error:
        log.info("train-tokenizer merges pairs in Python: %s", error)
        return None
