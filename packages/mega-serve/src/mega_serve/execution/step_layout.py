"""The token axis of a step: where each chunk's tokens, positions and pages are.

Legend: T tokens of all chunks, end to end; C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mega_serve.engine.interfaces import Chunk

IntArray = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The chunks of a step on one axis of tokens.

    Attributes:
        chunk_C4: of each chunk the first token on the axis, the number of tokens, the position of the first,
            and the index of its block table in `pages`.
        pages: the block tables, one after another.
        position_T: position of each token in its sequence.
        slot_T: page · page size + offset in the page, of each token.
        page_size: tokens of a page.
    """

    chunk_C4: IntArray
    pages: IntArray
    position_T: IntArray
    slot_T: IntArray
    page_size: int

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], *, page_size: int, num_pages: int) -> StepLayout:
        """Lay out the chunks of a step.

        Kernels read and write the pages without checks, so all are here: each chunk has tokens, its block
        table covers them, and every page is in the pool.
        """
        rows = []
        tokens = tables = 0
        for chunk in chunks:
            count = len(chunk.token_ids)
            assert count > 0, "a chunk has tokens"
            assert chunk.start >= 0, f"position {chunk.start}"
            covered = len(chunk.pages) * page_size
            assert chunk.start + count <= covered, f"position {chunk.start + count} in pages for {covered}"
            rows.append((tokens, count, chunk.start, tables))
            tokens += count
            tables += len(chunk.pages)
        chunk_C4 = np.array(rows, np.intp).reshape(-1, 4)
        pages = np.fromiter(chain.from_iterable(chunk.pages for chunk in chunks), np.intp, tables)
        assert pages.min() >= 0, f"page {pages.min()}"
        assert pages.max() < num_pages, f"page {pages.max()} of {num_pages}"
        if tokens == len(chunks):  # a step that decodes, many a second
            _, _, position_T, table_T = np.ascontiguousarray(chunk_C4.T)
        else:
            first_T, _, start_T, table_T = np.repeat(chunk_C4, chunk_C4[:, 1], axis=0).T
            position_T = np.arange(tokens) - first_T + start_T
        slot_T = pages[table_T + position_T // page_size] * page_size + position_T % page_size
        return cls(chunk_C4, pages, position_T, slot_T, page_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, cached and new."""
        return int((self.chunk_C4[:, 1] + self.chunk_C4[:, 2]).max())

    def block_table(self, chunk: int) -> IntArray:
        """Return the pages that hold a chunk's sequence up to its last token."""
        _, count, start, table = self.chunk_C4[chunk]
        return self.pages[table : table + -(-(start + count) // self.page_size)]


def pad_tables(layout: StepLayout) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the block tables of all chunks, (C, pages of the longest) int32, padded with zeros."""
    tables = [layout.block_table(c) for c in range(len(layout.chunk_C4))]
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
