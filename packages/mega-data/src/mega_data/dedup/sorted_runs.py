"""Sorted runs: the keys of consecutive documents that fit in memory together, sorted band by band.

    band 0: keys | numbers | checks     band 1: ...     index | sizes

    keys      u64, ascending; equal keys in the order of the documents; documents without shingles are missing
    numbers   u32, the document of each key, from 0 in the run
    checks    u64, only for whole texts: the second half of the hash
    index     for each band u32: where each cell of the key range begins, and the end
    sizes     for each band u32: the number of keys

A cell is one of 2^n equal parts of the key range. The keys of a range of cells are read with one seek, so all
ranges together read each run once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.band_store import Numbers
from mega_data.dedup.minhash import NO_KEY
from mega_data.output_formats import open_output

KEY_BITS = 64
CELL_DOCUMENTS = 256  # average of a cell; fewer if the tasks need more cells
MAX_CELLS = 1 << 12
Entries = tuple[Numbers, Numbers, Numbers | None]  # keys, numbers of documents, checks


def count_cells(documents: int, ranges: int) -> int:
    """Return the number of cells of a run: a power of two, at least the ranges of the tasks."""
    wanted = 1 << max(0, documents // CELL_DOCUMENTS).bit_length()
    return max(ranges, min(MAX_CELLS, wanted))


def write_run(
    path: Path,
    bands: int,
    cells: int,
    read_keys: Callable[[int], Numbers],
    read_checks: Callable[[], Numbers] | None,
) -> None:
    """Sort the keys of a run's documents.

    Args:
        read_keys: called with a band; returns the key of each document.
        read_checks: returns the check of each document; None: without checks.
    """
    index = np.zeros((bands, cells + 1), "<u4")
    shift = KEY_BITS - (cells.bit_length() - 1)
    bounds = np.array([cell << shift for cell in range(1, cells)], np.uint64)
    with open_output(path) as out:
        for band in range(bands):
            keys = read_keys(band)
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            skipped = int(np.searchsorted(keys, NO_KEY, "right"))
            keys = keys[skipped:]
            order = order[skipped:]
            out.write(np.ascontiguousarray(keys, "<u8").data)
            out.write(order.astype("<u4").data)
            if read_checks is not None:
                out.write(np.ascontiguousarray(read_checks()[order], "<u8").data)
            index[band, 1:-1] = np.searchsorted(keys, bounds)
            index[band, -1] = len(keys)
        out.write(index.data)
        out.write(np.ascontiguousarray(index[:, -1]).data)


@dataclass(frozen=True, slots=True)
class SortedRun:
    """A file of `write_run`.

    Attributes:
        first: number of the run's first document in the corpus.
        documents: number of documents of the run.
        cells: as in `write_run`.
        has_checks: whether the run has checks.
    """

    path: Path
    first: int
    documents: int
    bands: int
    cells: int
    has_checks: bool

    @property
    def entry_bytes(self) -> int:
        return 20 if self.has_checks else 12

    def open_range(self, band: int, part: int, parts: int) -> RunRange:
        """Read the index of one of `parts` equal parts of the key range; `parts` divides the cells."""
        width = self.cells // parts
        row = 4 * (band * (self.cells + 1) + part * width)
        with self.path.open("rb", buffering=0) as file:
            sizes_start = os.fstat(file.fileno()).st_size - 4 * self.bands
            sizes = _read_array(file, "<u4", sizes_start, self.bands).tolist()
            index_start = sizes_start - 4 * self.bands * (self.cells + 1)
            starts = _read_array(file, "<u4", index_start + row, width + 1)
        offset = sum(sizes[:band]) * self.entry_bytes
        return RunRange(self, offset, sizes[band], part * width, starts)


@dataclass(frozen=True, slots=True)
class RunRange:
    """A band of a run, between two cells.

    Attributes:
        offset: place of the band in the file.
        size: keys of the band.
        cell: the first cell.
        starts: place in the band of each cell, and the end.
    """

    run: SortedRun
    offset: int
    size: int
    cell: int
    starts: NDArray[np.uint32]

    def find(self, key: int) -> int:
        """Return the place of the first key that is not smaller; `key` is in the range or its end."""
        shift = KEY_BITS - (self.run.cells.bit_length() - 1)
        cell = (key >> shift) - self.cell
        start = int(self.starts[cell])
        if key == (cell + self.cell) << shift or start == self.starts[cell + 1]:
            return start
        shape = (int(self.starts[cell + 1]) - start,)
        keys = np.memmap(self.run.path, "<u8", "r", offset=self.offset + 8 * start, shape=shape)
        return start + int(np.searchsorted(keys, np.uint64(key)))

    def read(self, start: int, stop: int) -> Entries:
        """Read the entries between two places of the band."""
        count = stop - start
        with self.run.path.open("rb", buffering=0) as file:
            keys = _read_array(file, "<u8", self.offset + 8 * start, count)
            numbers = _read_array(file, "<u4", self.offset + 8 * self.size + 4 * start, count)
            checks = None
            if self.run.has_checks:
                checks = _read_array(file, "<u8", self.offset + 12 * self.size + 8 * start, count)
        return keys, numbers.astype(np.uint64) + np.uint64(self.run.first), checks


def _read_array(file: IO[bytes], dtype: str, offset: int, count: int) -> NDArray[Any]:
    size = count * np.dtype(dtype).itemsize
    values = bytearray()
    while len(values) < size:  # one read returns at most 2 GiB
        part = os.pread(file.fileno(), size - len(values), offset + len(values))
        assert part, f"{file.name} is shorter than its index"
        values += part
    return np.frombuffer(values, dtype)
