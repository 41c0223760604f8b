"""Pairs to groups: union-find on an array of numbers, where a group's root is its smallest document."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Parents = NDArray[np.uint64]
BACK = 32  # documents of one key that each is compared with, beside the first


def roots(parents: Parents, documents: NDArray[Any]) -> Parents:
    """The roots of some documents. A parent is never larger than its child."""
    found: Parents = parents[documents]
    while True:
        above = parents[found]
        if np.array_equal(above, found):
            return found
        found = above


def join(parents: Parents, pairs: NDArray[Any]) -> None:
    """Put the two documents of each pair in one group.

    Args:
        parents: each document's parent, itself at the start; changed in place, may be a file in memory.
        pairs: (n, 2).
    """
    a, b = pairs[:, 0], pairs[:, 1]
    while len(a):
        a, b = roots(parents, a), roots(parents, b)
        apart = a != b
        a, b = a[apart], b[apart]
        # a root with several wishes takes the smallest; the others are asked again
        np.minimum.at(parents, np.maximum(a, b), np.minimum(a, b))


def root(parents: Parents, document: int) -> int:
    """The root of one document; the way to it is shortened."""
    at = document
    while (above := int(parents[at])) != at:
        parents[at] = parents[above]
        at = above
    return at


def join_alike(parents: Parents, pairs: Iterable[NDArray[Any]], alike: Callable[[int, int], bool]) -> None:
    """Put documents that share a key and are alike in one group.

    Each is compared with the first that has the key and with up to `BACK` before it on either side: those in
    the first's group, and those that are not. So all are compared with all where a key has up to 33
    documents; Megatron's find_duplicates.py compares each with one, drawn by chance. What is in one group
    already is not compared again.

    Args:
        pairs: as `candidates.pairs` gives them.
    """

    def met(one: int, other: int) -> bool:
        a, b = root(parents, one), root(parents, other)
        if a != b:
            if not alike(one, other):
                return False
            parents[max(a, b)] = min(a, b)
        return True

    first = -1
    near, apart = deque[int](maxlen=BACK), deque[int](maxlen=BACK)
    for block in pairs:
        for one, other in block.tolist():
            if one != first:
                first = one
                near.clear()
                apart.clear()
            joined = met(first, other)
            for before in apart:
                met(before, other)
            for before in () if joined else near:
                joined |= met(before, other)
            (near if joined else apart).append(other)
