"""The free pages of a pool as runs of consecutive numbers.

Attention on a CPU reads consecutive pages as one slice of memory, so a sequence is placed where it can grow.
"""

from __future__ import annotations

from itertools import islice

# The runs that a search for the longest looks at: a step's cost does not grow with fragmentation
_SEARCHED_RUNS = 64


class FreePages:
    """Maximal runs of free page numbers, found by either end.

    Args:
        pages: all numbers below this are free at first.
    """

    def __init__(self, pages: int) -> None:
        self._end_of: dict[int, int] = {0: pages} if pages else {}  # first page -> one past the last
        self._start_of: dict[int, int] = {pages: 0} if pages else {}
        self._count = pages

    def __len__(self) -> int:
        return self._count

    def pages(self) -> list[int]:
        """Return the free page numbers in order."""
        return [page for start in sorted(self._end_of) for page in range(start, self._end_of[start])]

    def add(self, page: int) -> None:
        """Add a page and join it with its neighbours."""
        start = self._start_of.pop(page, page)
        end = self._end_of.pop(page + 1, page + 1)
        self._end_of[start] = end
        self._start_of[end] = start
        self._count += 1

    def take_following(self, page: int, count: int) -> list[int]:
        """Take up to `count` pages that follow a page: as many as are free without a gap."""
        start = page + 1
        end = self._end_of.get(start)
        if end is None:
            return []
        return self._take(start, end, start, min(end, start + count))

    def take(self, count: int) -> list[int]:
        """Take up to `count` consecutive pages of a long run, at least one.

        They begin in the middle of the space that remains, so that the sequence before the run can grow as
        well as this one.
        """
        assert self._count, "no page is free"
        start, end = max(islice(self._end_of.items(), _SEARCHED_RUNS), key=_run_length)
        remaining = max(0, end - start - count)
        first = start + (remaining // 2 if start else 0)
        return self._take(start, end, first, min(end, first + count))

    def _take(self, start: int, end: int, first: int, last: int) -> list[int]:
        """Remove the pages from `first` up to `last` from the run from `start` up to `end`."""
        del self._end_of[start], self._start_of[end]
        if start < first:
            self._end_of[start] = first
            self._start_of[first] = start
        if last < end:
            self._end_of[last] = end
            self._start_of[end] = last
        self._count -= last - first
        return list(range(first, last))


def _run_length(run: tuple[int, int]) -> int:
    return run[1] - run[0]
