"""Files of edges between documents, divided by blocks of documents.

The rows of a block are read without those of other blocks: a file has parts, each sorted, and an index of the
rows of every block in every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_data.output_formats import open_output

Rows = NDArray[np.uint64]  # (n, 2)
ROW_BYTES: Final = 16
BYTES_PER_DOCUMENT: Final = 48  # of a block: labels, flags and copies
BYTES_PER_ROW: Final = 128  # with the copies that sort it


@dataclass(frozen=True, slots=True)
class DocumentBlocks:
    """Equal blocks of consecutive documents; a task holds arrays of one block.

    Attributes:
        total: number of documents.
        size: documents of a block.
    """

    total: int
    size: int

    @property
    def count(self) -> int:
        return max(1, -(-self.total // self.size))

    def documents(self, block: int) -> range:
        return range(block * self.size, min(self.total, (block + 1) * self.size))

    def of_task(self, task: int, tasks: int) -> range:
        """Return the consecutive blocks of one of several tasks; some tasks may have none."""
        return range(task * self.count // tasks, (task + 1) * self.count // tasks)


@contextmanager
def open_edges(path: Path, blocks: DocumentBlocks, memory: int) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes rows, each to the block of its first document; equal rows may be left out.

    Args:
        memory: bytes for the rows of a part.
    """
    waiting = list[Rows]()
    limit = max(1, memory // BYTES_PER_ROW)

    def write_part() -> None:
        rows = sort_rows(np.concatenate(waiting))
        waiting.clear()
        edges = np.arange(blocks.count + 1, dtype=np.uint64) * np.uint64(blocks.size)
        index.write((np.searchsorted(rows[:, 0], edges).astype("<u8") + np.uint64(written)).data)
        out.write(np.ascontiguousarray(rows, "<u8").data)

    written = 0
    with open_output(path) as out, open_output(_index_path(path)) as index:

        def add(rows: Rows) -> None:
            nonlocal written
            if not len(rows):
                return
            waiting.append(rows)
            if sum(map(len, waiting)) >= limit:
                write_part()
                written = out.tell() // ROW_BYTES

        yield add
        if waiting:
            write_part()


def count_edges(path: Path) -> int:
    """Return the number of rows in a file."""
    return path.stat().st_size // ROW_BYTES


def sort_rows(rows: NDArray[Any]) -> Rows:
    """Return the different rows in their order."""
    ordered = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return ordered[is_new]


def read_edges(paths: Iterable[Path], block: int, blocks: DocumentBlocks, memory: int) -> Iterator[Rows]:
    """Yield the rows of a block in all files, in bounded memory."""
    width = 8 * (blocks.count + 1)
    limit = max(1, memory // BYTES_PER_ROW) * ROW_BYTES
    for path in paths:
        with path.open("rb", 0) as file, _index_path(path).open("rb", 0) as index:
            for offset in range(8 * block, index.seek(0, 2), width):
                index.seek(offset)
                start, stop = np.frombuffer(index.read(16), "<u8").tolist()
                file.seek(start * ROW_BYTES)
                left = (stop - start) * ROW_BYTES
                while left:
                    data = file.read(min(left, limit))
                    left -= len(data)
                    yield np.frombuffer(data, "<u8").reshape(-1, 2)


def _index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")
