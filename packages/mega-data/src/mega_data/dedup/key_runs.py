"""Sorted runs of rows by key: a task per shard writes them, a task per key range merges those of all shards.

    u64 rows per run | run 0: keys | column 1 | column 2 ... | run 1: ...

All columns are u64, one after the other. Keys ascend in a run; rows of equal keys keep their order. All runs
of a file but the last are full, so the file size gives the number of rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.output_formats import open_output

Numbers = NDArray[np.uint64]
BYTES_PER_ROW = 160  # columns, order and copies while rows are sorted
MAX_RUN_ROWS = 1 << 20
_HEADER = 8  # bytes
_SEARCHED_ROWS = 512  # read at once for the end of a binary search


@contextmanager
def open_run_writer(path: Path, columns: int, memory: int) -> Iterator[Callable[[Sequence[Numbers]], None]]:
    """Yield a function that appends rows, given as columns with the key first.

    Args:
        memory: bytes for sorting.
    """
    run_rows = max(1, min(MAX_RUN_ROWS, memory // BYTES_PER_ROW))
    pending: list[list[Numbers]] = [[] for _ in range(columns)]
    count = 0
    with open_output(path) as out:
        out.write(np.array([run_rows], "<u8").data)

        def put(rows: Sequence[Numbers]) -> None:
            order = np.argsort(rows[0], kind="stable")
            for column in rows:
                out.write(np.ascontiguousarray(column[order], "<u8").data)

        def add(rows: Sequence[Numbers]) -> None:
            nonlocal count
            for column, values in zip(pending, rows, strict=True):
                column.append(values)
            count += len(rows[0])
            if count >= run_rows:
                joined = [np.concatenate(column) for column in pending]
                full_rows = count // run_rows * run_rows
                for start in range(0, full_rows, run_rows):
                    put([column[start : start + run_rows] for column in joined])
                pending[:] = [[column[full_rows:].copy()] for column in joined]
                count -= full_rows

        yield add
        if count:
            put([np.concatenate(column) for column in pending])


@dataclass(frozen=True, slots=True)
class KeyRun:
    """A run of a file.

    Attributes:
        shard: number of the file.
        offset: first byte of the run.
        rows: number of rows of the run.
    """

    path: Path
    shard: int
    offset: int
    rows: int
    columns: int

    def key_at(self, row: int) -> int:
        """Read the key of a row."""
        return int(np.fromfile(self.path, "<u8", 1, offset=self.offset + 8 * row)[0])

    def find(self, key: int, start: int, stop: int) -> int:
        """Return the first row from `start` to `stop` whose key is not smaller."""
        if key >> 64:
            return stop
        with self.path.open("rb", buffering=0) as file:
            while stop - start > _SEARCHED_ROWS:
                middle = (start + stop) // 2
                data = os.pread(file.fileno(), 8, self.offset + 8 * middle)
                if int.from_bytes(data, "little") < key:
                    start = middle + 1
                else:
                    stop = middle
            data = os.pread(file.fileno(), 8 * (stop - start), self.offset + 8 * start)
        return start + int(np.searchsorted(np.frombuffer(data, "<u8"), np.uint64(key)))

    def read(self, start: int, stop: int) -> list[Numbers]:
        """Read the columns of the rows from `start` to `stop`."""
        offsets = [self.offset + 8 * (column * self.rows + start) for column in range(self.columns)]
        return [np.fromfile(self.path, "<u8", stop - start, offset=offset) for offset in offsets]


def list_runs(paths: Sequence[Path], columns: int) -> list[KeyRun]:
    """Return the runs of files, in the order of the files and of their rows."""
    runs = list[KeyRun]()
    for shard, path in enumerate(paths):
        rows = (path.stat().st_size - _HEADER) // (8 * columns)
        run_rows = int(np.fromfile(path, "<u8", 1)[0])
        for start in range(0, rows, run_rows):
            offset = _HEADER + 8 * columns * start
            runs.append(KeyRun(path, shard, offset, min(run_rows, rows - start), columns))
    return runs


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows of all shards, sorted by key; rows of one key are in the order of the shards and of their rows.

    Attributes:
        shards: shard of each row.
        columns: the columns; column 0 is the key.
        skip: number of rows at the start that an earlier block contains.
    """

    shards: NDArray[np.int64]
    columns: Sequence[Numbers]
    skip: int = 0

    def take(self, order: NDArray[np.int64]) -> SortedRows:
        """Return the rows in another order."""
        return SortedRows(self.shards[order], [column[order] for column in self.columns], self.skip)


Slices = list[tuple[KeyRun, int, int]]  # the rows of each run in a range of keys


def read_sorted(runs: Sequence[KeyRun], part: int, parts: int, memory: int) -> Iterator[SortedRows]:
    """Yield the rows of one of `parts` equal ranges of keys, in blocks of ascending keys.

    All rows of a key are in one block, except those of a key with more rows than fit in memory: each further
    block of it begins with its first row.

    Args:
        memory: bytes for a block.
    """
    limit = max(2, memory // BYTES_PER_ROW)
    low, high = _first_key(part, parts), _first_key(part + 1, parts)
    pending = [(low, high, _narrow([(run, 0, run.rows) for run in runs], low, high))]
    while pending:
        low, high, slices = pending.pop()
        if sum(stop - start for _, start, stop in slices) <= limit:
            if slices:
                rows = _read(slices)
                yield rows.take(np.argsort(rows.columns[0], kind="stable"))
        elif high - low == 1:
            yield from _read_key(slices, limit)
        else:
            # a key with many rows is soon alone
            run, start, stop = max(slices, key=lambda part: part[2] - part[1])
            middle = run.key_at((start + stop) // 2)
            for bounds in ((middle + 1, high), (middle, middle + 1), (low, middle)):
                pending.append((*bounds, _narrow(slices, *bounds)))


def _first_key(part: int, parts: int) -> int:
    """Return the first key of a part of all keys; 2^64 after the last part."""
    return -(-(part << 64) // parts)


def _narrow(slices: Slices, low: int, high: int) -> Slices:
    """Return the rows with keys from `low` up to `high`; runs without such rows are left out."""
    narrow_slices: Slices = []
    for run, start, stop in slices:
        first = run.find(low, start, stop)
        last = run.find(high, first, stop)
        if first < last:
            narrow_slices.append((run, first, last))
    return narrow_slices


def _read(slices: Slices) -> SortedRows:
    columns = [run.read(start, stop) for run, start, stop in slices]
    shards = np.repeat([run.shard for run, _, _ in slices], [stop - start for _, start, stop in slices])
    return SortedRows(shards, [np.concatenate(column) for column in zip(*columns, strict=True)])


def _read_key(slices: Slices, limit: int) -> Iterator[SortedRows]:
    """Yield blocks of one key, whose rows are in order already."""
    run, start, _ = slices[0]
    first = _read([(run, start, start + 1)])
    is_first = True
    for run, start, stop in slices:
        for row in range(start, stop, limit - 1):
            rows = _read([(run, row, min(stop, row + limit - 1))])
            if is_first:
                yield rows
                is_first = False
                continue
            columns = [np.concatenate(pair) for pair in zip(first.columns, rows.columns, strict=True)]
            yield SortedRows(np.concatenate([first.shards, rows.shards]), columns, skip=1)
