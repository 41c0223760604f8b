"""Find pairs of documents that share a band key, in bounded memory, with each sorted run read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.band_store import Numbers
from mega_data.dedup.sorted_runs import KEY_BITS, Entries, RunRange, SortedRun

Places = NDArray[np.int64]  # in the band of each run
BYTES_PER_DOCUMENT = 64  # keys, numbers, order and copies while a part of the keys is sorted


def candidate_pairs(
    runs: Sequence[SortedRun], band: int, part: int, parts: int, memory: int
) -> Iterator[Numbers]:
    """Yield (n, 2) arrays of documents that share a key: the first of them, and each of the others.

    The pairs are in the order of their keys, those of one key in the order of the documents.

    Args:
        runs: in the order of their documents.
        part: which of the `parts` equal parts of the key range, a power of two.
        memory: bytes for sorting.
    """
    ranges = [run.open_range(band, part, parts) for run in runs]
    width = (1 << KEY_BITS) // parts
    starts = np.array([int(span.starts[0]) for span in ranges], np.int64)
    stops = np.array([int(span.starts[-1]) for span in ranges], np.int64)
    pending = [(part * width, (part + 1) * width, starts, stops)]  # the next part is the last
    entries = max(1, memory // BYTES_PER_DOCUMENT)
    while pending:
        low, high, starts, stops = pending.pop()
        if int((stops - starts).sum()) <= entries:
            yield from _sorted_pairs(ranges, starts, stops)
        elif high - low == 1:
            yield from _pairs_of_key(ranges, starts, stops, entries)
        else:
            middle = (low + high) // 2
            middles = starts.copy()
            for number in np.flatnonzero(stops > starts).tolist():
                middles[number] = ranges[number].find(middle)
            pending += [(middle, high, middles, stops), (low, middle, starts, middles)]


def _sorted_pairs(ranges: Sequence[RunRange], starts: Places, stops: Places) -> Iterator[Numbers]:
    """Sort the keys of all runs in memory; yield their pairs."""
    keys, numbers, checks = _concatenate(
        [
            ranges[run].read(int(starts[run]), int(stops[run]))
            for run in np.flatnonzero(stops > starts).tolist()
        ]
    )
    order = np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    repeats = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    if not len(repeats):
        return
    # start of each run of equal keys: the last change of key at or before each place
    is_first_of_key = np.ones(len(keys), bool)
    is_first_of_key[1:] = keys[1:] != keys[:-1]
    firsts = np.maximum.accumulate(np.where(is_first_of_key, np.arange(len(keys)), 0))[repeats]
    if checks is not None:
        is_equal = checks[order[firsts]] == checks[order[repeats]]
        firsts, repeats = firsts[is_equal], repeats[is_equal]
    yield np.stack([numbers[firsts], numbers[repeats]], axis=1)


def _pairs_of_key(
    ranges: Sequence[RunRange], starts: Places, stops: Places, entries: int
) -> Iterator[Numbers]:
    """Yield the pairs of one key with more documents than fit in memory: they are in order already."""
    first: Numbers | None = None
    first_check: Numbers | None = None
    for run in np.flatnonzero(stops > starts).tolist():
        for start in range(int(starts[run]), int(stops[run]), entries):
            _, numbers, checks = ranges[run].read(start, min(start + entries, int(stops[run])))
            if first is None:
                first, first_check = numbers[:1], None if checks is None else checks[:1]
                numbers, checks = numbers[1:], None if checks is None else checks[1:]
            if checks is not None and first_check is not None:
                numbers = numbers[checks == first_check]
            yield np.stack([np.repeat(first, len(numbers)), numbers], axis=1)


def _concatenate(entries: Sequence[Entries]) -> Entries:
    if not entries:
        empty = np.empty(0, np.uint64)
        return empty, empty, None
    checks = [part[2] for part in entries if part[2] is not None]
    return (
        np.concatenate([part[0] for part in entries]),
        np.concatenate([part[1] for part in entries]),
        np.concatenate(checks) if checks else None,
    )
