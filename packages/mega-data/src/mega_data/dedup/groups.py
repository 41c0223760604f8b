"""Pairs to groups: union-find on an array of numbers, where a group's root is its smallest document."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Parents = NDArray[np.uint64]


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
