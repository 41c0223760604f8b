"""Group pairs by union-find on an array, where a group's root is its smallest document."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Parents = NDArray[np.uint64]
MAX_COMPARED = 32  # documents of one key that each is compared with, besides the first


def find_roots(parents: Parents, documents: NDArray[Any]) -> Parents:
    """Return the roots of some documents. A parent is never larger than its child."""
    current: Parents = parents[documents]
    while True:
        parent = parents[current]
        if np.array_equal(parent, current):
            return current
        current = parent


def union(parents: Parents, pairs: NDArray[Any]) -> None:
    """Put the two documents of each pair in one group.

    Args:
        parents: each document's parent, itself at the start; changed in place, may be a memory-mapped file.
        pairs: (n, 2).
    """
    a, b = pairs[:, 0], pairs[:, 1]
    while len(a):
        a, b = find_roots(parents, a), find_roots(parents, b)
        differs = a != b
        a, b = a[differs], b[differs]
        # a root with several candidates takes the smallest; the others are joined in the next round
        np.minimum.at(parents, np.maximum(a, b), np.minimum(a, b))


def find_root(parents: Parents, document: int) -> int:
    """Return the root of one document and shorten the path to it."""
    node = document
    while (parent := int(parents[node])) != node:
        parents[node] = parents[parent]
        node = parent
    return node


def union_similar(
    parents: Parents, pairs: Iterable[NDArray[Any]], is_similar: Callable[[int, int], bool]
) -> None:
    """Put documents that share a key and are similar in one group.

    Each document is compared with the first one of its key, and with up to `MAX_COMPARED` earlier ones inside
    and outside of that document's group. So all documents are compared with each other if a key has up to 33.
    Megatron's find_duplicates.py compares each with a random one. Documents of one group are not compared
    again.

    Args:
        pairs: the result of `candidates.candidate_pairs`.
    """

    def union_if_similar(first_document: int, document: int) -> bool:
        a, b = find_root(parents, first_document), find_root(parents, document)
        if a != b:
            if not is_similar(first_document, document):
                return False
            parents[max(a, b)] = min(a, b)
        return True

    first = -1
    in_group, out_of_group = deque[int](maxlen=MAX_COMPARED), deque[int](maxlen=MAX_COMPARED)
    for block in pairs:
        for first_document, document in block.tolist():
            if first_document != first:
                first = first_document
                in_group.clear()
                out_of_group.clear()
            is_joined = union_if_similar(first, document)
            for earlier in out_of_group:
                union_if_similar(earlier, document)
            for earlier in () if is_joined else in_group:
                is_joined |= union_if_similar(earlier, document)
            (in_group if is_joined else out_of_group).append(document)
