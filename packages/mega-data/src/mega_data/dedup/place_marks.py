"""Marked places of shards: a task per key range writes them in any order, a task per shard reads its own.

A file has chunks. A chunk has the u64 number of its first row for each shard, the end of the rows, then the
rows: the place in the shard and further u64 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.key_runs import Numbers
from mega_data.output_formats import open_output

_BLOCK_ROWS = 1 << 16  # read at once


@dataclass(frozen=True, slots=True)
class PlaceMarks:
    """The files of the marks of a stage.

    Attributes:
        parts: number of files.
        columns: columns of a row, with the place.
    """

    folder: Path
    parts: int
    shards: int
    columns: int

    @contextmanager
    def open_writer(self, part: int) -> Iterator[Callable[[NDArray[np.int64], Sequence[Numbers]], None]]:
        """Yield a function that appends rows as a chunk, given as the shard of each row and the columns."""
        with open_output(self._path(part)) as out:

            def add(shards: NDArray[np.int64], columns: Sequence[Numbers]) -> None:
                order = np.argsort(shards, kind="stable")
                counts = np.bincount(shards, minlength=self.shards)
                out.write(np.concatenate([[0], np.cumsum(counts)]).astype("<u8").data)
                out.write(np.stack([column[order] for column in columns], axis=1).astype("<u8").data)

            yield add

    def read(self, shard: int) -> Iterator[Numbers]:
        """Yield the (n, columns) rows of a shard in blocks."""
        row_bytes = 8 * self.columns
        for part in range(self.parts):
            with self._path(part).open("rb") as file:
                while header := file.read(8 * (self.shards + 1)):
                    starts = np.frombuffer(header, "<u8")
                    first, end, last = (int(starts[index]) for index in (shard, shard + 1, -1))
                    offset = file.tell()
                    file.seek(offset + row_bytes * first)
                    for row in range(first, end, _BLOCK_ROWS):
                        rows = min(_BLOCK_ROWS, end - row)
                        yield np.frombuffer(file.read(row_bytes * rows), "<u8").reshape(rows, self.columns)
                    file.seek(offset + row_bytes * last)

    def _path(self, part: int) -> Path:
        return self.folder / f"{part:05d}"


class ShardFlags:
    """Which tokens of a shard are marked, read document after document.

    Flags of consecutive documents are in memory together; each further block reads the marks again.

    Args:
        firsts: place of the first token of each document of the shard, and the end.
        memory: bytes of flags, one per token.
        keeps_rows: whether to keep the marks that begin a run of marked places, see `row_at`.
    """

    def __init__(
        self, marks: PlaceMarks, shard: int, firsts: Numbers, memory: int, *, keeps_rows: bool = False
    ) -> None:
        self._marks = marks
        self._shard = shard
        self._firsts = firsts
        self._memory = memory
        self._keeps_rows = keeps_rows
        self._flags = np.empty(0, bool)
        self._start = self._stop = 0  # places of the flags in memory
        self._run_starts = np.empty(0, np.uint64)
        self._run_rows = np.empty((0, marks.columns), np.uint64)

    def of_document(self, document: int) -> NDArray[np.bool_] | None:
        """Return a flag per token of a document, None if no token is marked; documents ascend."""
        start, stop = int(self._firsts[document]), int(self._firsts[document + 1])
        if stop > self._stop:
            self._load(start, max(stop, min(int(self._firsts[-1]), start + self._memory)))
        flags = self._flags[start - self._start : stop - self._start]
        return flags if flags.any() else None

    def first_of(self, document: int) -> int:
        """Return the place of the first token of a document."""
        return int(self._firsts[document])

    def offsets_of(self, documents: Sequence[int]) -> NDArray[np.int64]:
        """Return the place of each document's first token, less the tokens of the documents before it."""
        firsts = self._firsts[documents].astype(np.int64)
        tokens = self._firsts[np.array(documents) + 1].astype(np.int64) - firsts
        offsets: NDArray[np.int64] = firsts - np.cumsum(tokens) + tokens
        return offsets

    def row_at(self, place: int) -> list[int]:
        """Return the mark at a place that is marked, after one that is not."""
        row: list[int] = self._run_rows[int(np.searchsorted(self._run_starts, place))].tolist()
        assert row[0] == place
        return row

    def _load(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._flags = np.zeros(stop - start, bool)
        for rows in self._marks.read(self._shard):
            places = rows[:, 0]
            self._flags[places[(places >= start) & (places < stop)] - np.uint64(start)] = True
        if self._keeps_rows:
            self._load_rows()

    def _load_rows(self) -> None:
        is_start = self._flags.copy()
        is_start[1:] &= ~self._flags[:-1]
        self._run_starts = np.flatnonzero(is_start).astype(np.uint64) + np.uint64(self._start)
        self._run_rows = np.zeros((len(self._run_starts), self._marks.columns), np.uint64)
        if not len(self._run_starts):
            return
        for rows in self._marks.read(self._shard):
            indexes = np.searchsorted(self._run_starts, rows[:, 0])
            is_match = self._run_starts[np.minimum(indexes, len(self._run_starts) - 1)] == rows[:, 0]
            self._run_rows[indexes[is_match]] = rows[is_match]
