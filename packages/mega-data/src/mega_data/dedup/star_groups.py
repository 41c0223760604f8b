"""Find the groups of a large corpus in tasks over blocks of documents, by contraction to stars.

Each group of documents that pairs connect becomes a star: edges from its smallest document to the others
(Kiveris et al., Connected Components in MapReduce and Beyond, SoCC 2014). Two operations take turns, and keep
documents connected:

    small star   links each document and its smaller neighbours to the smallest of them
    large star   links the larger neighbours of each document to its smallest neighbour

The groups of near-duplicates are small, so after ROUNDS operations nearly all are stars. The edges of the
others, such as long chains, go to one process. Its memory is bounded too, see `components`.

    pairs     a task per band and part of the key range, as for a small corpus   -> edges/0
    stars-N   a task per blocks of documents: one operation                      -> edges/N
    settle    edges between documents of groups that are no stars                -> edges/residual
    groups    one task: the roots of these documents                             -> edges/roots
    labels    the root of each star, sent to its documents                       -> edges/labels
    roots     the root of each document                                          -> roots
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.components import write_roots
from mega_data.dedup.edge_files import (
    BYTES_PER_DOCUMENT,
    BYTES_PER_ROW,
    ROW_BYTES,
    DocumentBlocks,
    Rows,
    count_edges,
    open_edges,
    read_edges,
)
from mega_data.dedup.union_find import find_roots, union
from mega_data.dedup.work_files import BLOCK_PAIRS, WorkFiles
from mega_data.output_formats import open_output
from mega_data.task_stages import TaskResult
from mega_schema.atomic_io import full_disk_errors

ROUNDS: Final = 3  # small star, large star, small star
_RESIDUAL: Final = "residual"
_ROOTS: Final = "roots"
_LABELS: Final = "labels"


@dataclass(frozen=True, slots=True)
class StarGroups:
    """Writes the root of each document.

    Attributes:
        tasks: of each stage.
        sources: tasks of the stage that writes the pairs.
        memory: bytes for a block of documents, and for rows.
    """

    files: WorkFiles
    tasks: int
    sources: int
    memory: int

    def stages(self) -> list[tuple[str, int, Callable[[int], TaskResult]]]:
        """Return the name, the number of tasks and the work of each stage after the pairs."""
        contractions = [
            (f"stars-{number}", self.tasks, partial(self.contract, number)) for number in range(1, ROUNDS + 1)
        ]
        return [
            *contractions,
            ("settle", self.tasks, self.settle),
            ("groups", 1, self.join),
            ("labels", self.tasks, self.label),
            ("roots", self.tasks, self.write),
        ]

    def _blocks(self) -> DocumentBlocks:
        return self._divide(self.files.read_firsts()[-1])

    def _divide(self, total: int) -> DocumentBlocks:
        return DocumentBlocks(total, max(1, self.memory // BYTES_PER_DOCUMENT))

    def write_pairs(self, task: int, pairs: Iterable[NDArray[Any]], total: int) -> int:
        """Write the pairs of a task as edges from the larger document; return their number."""
        count = 0
        with open_edges(self._path("0", task), self._divide(total), self.memory // 2) as add:
            for block in pairs:
                rows = np.sort(block.astype(np.uint64), axis=1)[:, ::-1]
                add(rows)
                count += len(rows)
        return count

    def contract(self, number: int, task: int) -> TaskResult:
        """Do operation `number`, from 1 on, for the blocks of a task: a small star if it is odd."""
        blocks = self._blocks()
        is_small = number % 2 == 1
        path = self._path(str(number), task)
        with open_edges(path, blocks, self.memory // 2) as add:
            for block in blocks.of_task(task, self.tasks):
                documents = np.arange(*_ends(blocks.documents(block)), dtype=np.uint64)
                first = np.uint64(block * blocks.size)
                smallest = documents.copy()
                for rows in self._read(str(number - 1), block, blocks):
                    np.minimum.at(smallest, rows[:, 0] - first, rows[:, 1])
                if is_small:
                    _add_both(add, _rows(documents, smallest)[documents != smallest])
                for rows in self._read(str(number - 1), block, blocks):
                    edges = _rows(rows[:, 1], smallest[rows[:, 0] - first])
                    if is_small:
                        _add_both(add, edges[edges[:, 0] != edges[:, 1]])
                    else:
                        add(edges[rows[:, 1] > rows[:, 0]])
        return {"edges": count_edges(path)}

    def settle(self, task: int) -> TaskResult:
        """Write the edges to smaller documents from those that have a smaller and another neighbour."""
        blocks = self._blocks()
        count = 0
        with open_output(self._path(_RESIDUAL, task)) as out:
            for block in blocks.of_task(task, self.tasks):
                documents = blocks.documents(block)
                smallest = np.arange(*_ends(documents), dtype=np.uint64)
                largest_below = np.zeros(len(documents), np.uint64)
                has_larger = np.zeros(len(documents), bool)
                for rows in self._read(str(ROUNDS), block, blocks):
                    places = rows[:, 0] - np.uint64(documents.start)
                    is_below = rows[:, 1] < rows[:, 0]
                    np.minimum.at(smallest, places, rows[:, 1])
                    np.maximum.at(largest_below, places[is_below], rows[is_below, 1])
                    has_larger[places[~is_below]] = True
                is_inner = has_larger | (largest_below != smallest)
                for rows in self._read(str(ROUNDS), block, blocks):
                    is_below = rows[:, 1] < rows[:, 0]
                    inner = rows[is_below & is_inner[rows[:, 0] - np.uint64(documents.start)]]
                    out.write(np.ascontiguousarray(inner, "<u8").data)
                    count += len(inner)
        return {"edges": count}

    def join(self, _: int) -> TaskResult:
        """Write the roots of the documents of these edges that are not their own roots."""
        blocks = self._blocks()
        paths = [self._path(_RESIDUAL, task) for task in range(self.tasks)]
        rows = sum(map(count_edges, paths))
        with open_edges(self._path(_ROOTS, 0), blocks, self.memory // 2) as add:
            if rows * BYTES_PER_ROW <= self.memory:
                edges = np.concatenate([np.fromfile(path, "<u8") for path in paths])
                documents = np.unique(edges)
                parents = np.arange(len(documents), dtype=np.uint64)
                union(parents, np.searchsorted(documents, edges).reshape(-1, 2).astype(np.uint64))
                roots = documents[find_roots(parents, np.arange(len(documents)))]
                add(_rows(documents, roots)[documents != roots])
            elif blocks.total:
                scratch = self.files.components
                all_roots = scratch.with_name(f"{scratch.name}-roots")
                write_roots(_read_pairs(paths), blocks.total, all_roots, scratch, self.memory)
                for block in range(blocks.count):
                    first, stop = _ends(blocks.documents(block))
                    numbers = np.arange(first, stop, dtype=np.uint64)
                    roots = np.fromfile(all_roots, "<u8", stop - first, offset=8 * first)
                    add(_rows(numbers, roots)[numbers != roots])
                all_roots.unlink()
        return {"edges": rows}

    def label(self, task: int) -> TaskResult:
        """Send the root of each document to its larger neighbours."""
        blocks = self._blocks()
        path = self._path(_LABELS, task)
        with open_edges(path, blocks, self.memory // 2) as add:
            for block in blocks.of_task(task, self.tasks):
                roots = self._known_roots(block, blocks, 0)
                for rows in self._read(str(ROUNDS), block, blocks):
                    larger = rows[rows[:, 1] > rows[:, 0]]
                    add(_rows(larger[:, 1], roots[larger[:, 0] - np.uint64(block * blocks.size)]))
        return {"edges": count_edges(path)}

    def write(self, task: int) -> TaskResult:
        """Write the roots of the documents of a task to their place in the file of all roots."""
        blocks = self._blocks()
        path = self.files.roots
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with full_disk_errors(path):
                for block in blocks.of_task(task, self.tasks):
                    roots = self._known_roots(block, blocks, self.tasks)
                    data = memoryview(roots.astype("<u8").tobytes())
                    offset = 8 * block * blocks.size
                    while data:
                        size = os.pwrite(file, data, offset)
                        data = data[size:]
                        offset += size
                os.fsync(file)
        finally:
            os.close(file)
        return {}

    def _known_roots(self, block: int, blocks: DocumentBlocks, labels: int) -> NDArray[np.uint64]:
        """Return the roots of a block that files give; the other documents are their own roots.

        Args:
            labels: tasks that have sent labels.
        """
        first, stop = _ends(blocks.documents(block))
        roots = np.arange(first, stop, dtype=np.uint64)
        paths = [self._path(_ROOTS, 0), *(self._path(_LABELS, number) for number in range(labels))]
        for rows in read_edges(paths, block, blocks, self.memory // 2):
            roots[rows[:, 0] - np.uint64(first)] = rows[:, 1]
        return roots

    def _read(self, name: str, block: int, blocks: DocumentBlocks) -> Iterator[Rows]:
        count = self.sources if name == "0" else self.tasks
        paths = (self._path(name, number) for number in range(count))
        return read_edges(paths, block, blocks, self.memory // 2)

    def _path(self, name: str, task: int) -> Path:
        return self.files.folder / "edges" / name / f"{task:05d}"


def _add_both(add: Callable[[Rows], None], edges: Rows) -> None:
    """Add the edges in both directions, for a large star."""
    add(edges)
    add(edges[:, ::-1])


def _ends(documents: range) -> tuple[int, int]:
    return documents.start, documents.stop


def _rows(first: NDArray[Any], second: NDArray[Any]) -> Rows:
    return np.stack([first, second], axis=1)


def _read_pairs(paths: list[Path]) -> Iterator[Rows]:
    for path in paths:
        with path.open("rb") as file:
            while data := file.read(ROW_BYTES * BLOCK_PAIRS):
                yield np.frombuffer(data, "<u8").reshape(-1, 2)
