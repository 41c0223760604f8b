"""Find the connected components of many pairs with memory for a part of the documents only.

The documents are divided into blocks that fit in memory. From the last block to the first, the pairs inside
of a block are joined in memory. Each joined part then exchanges its pairs with earlier blocks: it keeps a
link to its smallest earlier document, and a pair of that document with each of the others goes to the block
of the latter. The part and these documents stay connected, and the pairs do not become more. In a second
pass, from the first block to the last, each link receives the root of its document (Sibeyn, External
connected components, SWAT 2004, with blocks of nodes). Pairs, links and answers are in files by block. Each
file is read once, and one file is open at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.union_find import find_roots, union
from mega_data.output_formats import open_output

Pairs = NDArray[np.uint64]
BYTES_PER_DOCUMENT = 48  # parents, links and copies
BYTES_PER_PAIR = 128  # with the copies that sort it
NO_LINK = np.uint64(2**64 - 1)


def write_roots(pairs: Iterable[NDArray[Any]], total: int, path: Path, scratch: Path, memory: int) -> None:
    """Write the root of each document, its group's smallest one, as u64.

    Args:
        pairs: (n, 2) arrays.
        total: number of documents.
        scratch: folder of intermediate files; replaced, and removed at the end.
        memory: bytes.
    """
    block = max(1, memory // BYTES_PER_DOCUMENT)
    with open_output(path) as out:
        if total <= block:
            parents = np.arange(total, dtype=np.uint64)
            for pair in pairs:
                union(parents, pair)
            out.write(find_roots(parents, np.arange(total)).astype("<u8").data)
            return
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        components = BlockComponents(scratch, total, block, max(1, memory // BYTES_PER_PAIR))
        for pair in pairs:
            components.add_pairs(pair)
        for roots in components.roots():
            out.write(roots.astype("<u8").data)
        shutil.rmtree(scratch)


@dataclass(frozen=True, slots=True)
class BlockComponents:
    """The files of the blocks.

    Attributes:
        block: documents in a block.
        rows: pairs read at once.
    """

    folder: Path
    total: int
    block: int
    rows: int

    def add_pairs(self, pairs: NDArray[Any]) -> None:
        """Append pairs to the files of the block of the larger document."""
        ordered: Pairs = np.sort(pairs.astype(np.uint64), axis=1)
        ordered = ordered[ordered[:, 0] != ordered[:, 1]]
        blocks = ordered // np.uint64(self.block)
        is_inner = blocks[:, 0] == blocks[:, 1]
        self._append("inner", blocks[is_inner, 1], ordered[is_inner])
        self._append("outer", blocks[~is_inner, 1], ordered[~is_inner])

    def roots(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the roots of all documents, block by block."""
        blocks = -(-self.total // self.block)
        for number in reversed(range(blocks)):
            self._join_block(number)
        for number in range(blocks):
            yield self._resolve_block(number)

    def _join_block(self, number: int) -> None:
        first = np.uint64(number * self.block)
        count = min(self.block, self.total - number * self.block)
        parents = np.arange(count, dtype=np.uint64)
        for pairs in self._read("inner", number):
            union(parents, pairs - first)
        links = np.full(count, NO_LINK)
        for pairs in self._read("outer", number):
            self.add_pairs(_add_links(links, find_roots(parents, pairs[:, 1] - first), pairs[:, 0]))
        roots = find_roots(parents, np.arange(count))
        (self.folder / f"roots-{number}").write_bytes(roots.astype("<u8").data)
        linked = np.flatnonzero(links != NO_LINK)
        rows = np.stack([links[linked], linked.astype(np.uint64) + first], axis=1)
        self._append("links", rows[:, 0] // np.uint64(self.block), rows)

    def _resolve_block(self, number: int) -> NDArray[np.uint64]:
        first = np.uint64(number * self.block)
        file = self.folder / f"roots-{number}"
        parents = np.fromfile(file, "<u8")
        file.unlink()
        answers = np.arange(len(parents), dtype=np.uint64) + first
        for rows in self._read("answers", number):
            answers[rows[:, 0] - first] = rows[:, 1]
        roots: NDArray[np.uint64] = answers[parents]
        for rows in self._read("links", number):
            answer = np.stack([rows[:, 1], roots[rows[:, 0] - first]], axis=1)
            self._append("answers", rows[:, 1] // np.uint64(self.block), answer)
        return roots

    def _append(self, name: str, blocks: NDArray[np.uint64], rows: Pairs) -> None:
        order = np.argsort(blocks, kind="stable")
        numbers, starts = np.unique(blocks[order], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(rows[order], starts[1:]), strict=False):
            with (self.folder / f"{name}-{number}").open("ab") as file:
                file.write(np.ascontiguousarray(part, "<u8").data)

    def _read(self, name: str, number: int) -> Iterator[Pairs]:
        """Yield the rows of a file in parts, then remove it."""
        path = self.folder / f"{name}-{number}"
        if not path.exists():
            return
        with path.open("rb") as file:
            while data := file.read(16 * self.rows):
                yield np.frombuffer(data, "<u8").reshape(-1, 2)
        path.unlink()


def _add_links(links: NDArray[np.uint64], parts: NDArray[Any], documents: NDArray[Any]) -> Pairs:
    """Link each part to the smallest of its earlier documents; return pairs of that one with the others.

    Args:
        links: of the parts so far; changed in place.
        parts: the part of each pair.
        documents: the earlier document of each pair.
    """
    previous = links[parts]
    np.minimum.at(links, parts, documents)
    smallest = links[parts]
    differs = documents != smallest
    is_replaced = (previous != NO_LINK) & (previous != smallest)
    return np.unique(
        np.concatenate(
            [
                np.stack([smallest[differs], documents[differs]], axis=1),
                np.stack([smallest[is_replaced], previous[is_replaced]], axis=1),
            ]
        ),
        axis=0,
    )
