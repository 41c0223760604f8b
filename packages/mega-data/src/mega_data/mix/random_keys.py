"""Pseudo-random numbers of documents: each follows from a seed, a source and the document's number alone.

So the result depends neither on the division into tasks nor on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
# of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
_INCREMENT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def random_keys(seed: int, purpose: str, source: int, documents: NDArray[np.int64]) -> Keys:
    """Return a 64-bit number for each document: SplitMix64 at the document's number.

    Args:
        purpose: numbers for different purposes are independent.
    """
    text = f"{seed}/{purpose}/{source}".encode()
    start = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    values = (documents.astype(np.uint64) + np.uint64(1)) * np.uint64(_INCREMENT) + np.uint64(start)
    for shift, factor in _ROUNDS:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(_LAST_SHIFT))


def choose_split(
    seed: int, source: int, documents: NDArray[np.int64], fractions: Sequence[float]
) -> NDArray[np.int64]:
    """Return the number of the split of each document.

    Args:
        fractions: of the splits; they add up to 1.
    """
    uniform = random_keys(seed, "split", source, documents) / 2.0**64
    return np.searchsorted(np.cumsum(fractions)[:-1], uniform, "right")


def count_copies(seed: int, source: int, documents: NDArray[np.int64], epochs: float) -> NDArray[np.int64]:
    """Return how often each document is read in this number of epochs.

    A fraction of an epoch is a random selection of the documents; a larger fraction selects these and more.
    """
    whole = int(epochs)
    is_selected = random_keys(seed, "epoch", source, documents) / 2.0**64 < epochs - whole
    return whole + is_selected.astype(np.int64)


def sort_copies(
    seed: int, source: int, first: int, members: NDArray[np.int64], copies: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Keys]:
    """Return documents of a range in the order of the keys of their copies, and the keys.

    Args:
        first: number of the first document of the range.
        members: numbers in the range of the documents to sort.
        copies: of each document of the range.
    """
    chosen = [np.empty(0, np.int64)]
    keys = [np.empty(0, np.uint64)]
    for copy in range(int(copies[members].max(initial=0))):
        repeated = members[copies[members] > copy]
        chosen.append(repeated)
        keys.append(random_keys(seed, f"order/{copy}", source, repeated + first))
    all_chosen, all_keys = np.concatenate(chosen), np.concatenate(keys)
    # equal keys: in the order of the documents, in which the parts are read
    by_document = np.argsort(all_chosen, kind="stable")
    order = by_document[np.argsort(all_keys[by_document], kind="stable")]
    return all_chosen[order], all_keys[order]
