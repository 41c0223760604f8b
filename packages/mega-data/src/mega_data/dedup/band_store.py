"""A file with the band keys of a shard, from which one band can be read alone.

    block 0: up to 2^16 documents   band 0: u64 of each document | band 1 | ...
    block 1: ...

All blocks but the last are full, so the file size gives the number of documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.output_formats import open_output

Numbers = NDArray[np.uint64]
BLOCK_DOCUMENTS = 1 << 16


@contextmanager
def open_column_writer(path: Path, columns: int) -> Iterator[Callable[[Numbers], None]]:
    """Yield a function that appends (n, columns) numbers of documents."""
    pending = list[Numbers]()
    count = 0
    with open_output(path) as out:

        def put(rows: Numbers) -> None:
            out.write(np.ascontiguousarray(rows.T, "<u8").data)

        def add(rows: Numbers) -> None:
            nonlocal count
            pending.append(rows)
            count += len(rows)
            if count >= BLOCK_DOCUMENTS:
                rows_so_far = np.concatenate(pending)
                full_rows = count // BLOCK_DOCUMENTS * BLOCK_DOCUMENTS
                for start in range(0, full_rows, BLOCK_DOCUMENTS):
                    put(rows_so_far[start : start + BLOCK_DOCUMENTS])
                pending[:] = [rows_so_far[full_rows:]]
                count -= full_rows

        yield add
        if count:
            put(np.concatenate(pending))


def count_documents(path: Path, columns: int) -> int:
    """Count the documents of a file."""
    return path.stat().st_size // (8 * columns)


def select_documents(path: Path, columns: int, is_selected: NDArray[np.bool_], output: Path) -> None:
    """Write a file with the numbers of some documents of another file."""
    with path.open("rb") as file, open_column_writer(output, columns) as put:
        for start in range(0, len(is_selected), BLOCK_DOCUMENTS):
            selected = is_selected[start : start + BLOCK_DOCUMENTS]
            block = np.frombuffer(file.read(8 * columns * len(selected)), "<u8")
            put(block.reshape(columns, -1).T[selected])


def join_documents(paths: Iterable[Path], columns: int, output: Path) -> None:
    """Write a file with the numbers of the documents of other files."""
    with open_column_writer(output, columns) as put:
        for path in paths:
            count = count_documents(path, columns)
            with path.open("rb") as file:
                for start in range(0, count, BLOCK_DOCUMENTS):
                    rows = min(BLOCK_DOCUMENTS, count - start)
                    put(np.frombuffer(file.read(8 * columns * rows), "<u8").reshape(columns, -1).T)


def read_column(
    path: Path, number: int, columns: int, start: int = 0, stop: int | None = None
) -> Iterator[Numbers]:
    """Yield one column of the documents from `start` to `stop`, by default of all, in blocks."""
    with path.open("rb", buffering=0) as file:
        count = os.fstat(file.fileno()).st_size // (8 * columns)
        end = count if stop is None else stop
        for block in range(start // BLOCK_DOCUMENTS * BLOCK_DOCUMENTS, end, BLOCK_DOCUMENTS):
            rows = min(BLOCK_DOCUMENTS, count - block)
            first, last = max(start, block), min(end, block + rows)
            file.seek(8 * (block * columns + number * rows + first - block))
            yield np.frombuffer(file.read(8 * (last - first)), "<u8")
