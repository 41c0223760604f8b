"""Documents sorted by a random key, in files: each task of a shuffle writes one, and reads a range of each.

PART/SPLIT.keys        uint64, key of each document, ascending
PART/SPLIT.sequences   int64, sequences of each document
PART/SPLIT.lengths     int32, tokens of each sequence
PART/SPLIT.ids         ids of the documents, end to end
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.output_formats import open_output

_BLOCK_DOCUMENTS = 1 << 14  # joined at a time


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Documents in memory.

    Attributes:
        keys: (D,) uint64.
        sequences: (D,) int64, sequences of each document.
        lengths: (N,) int32, tokens of each sequence.
        ids: ids of all documents, end to end.
    """

    keys: NDArray[np.uint64]
    sequences: NDArray[np.int64]
    lengths: NDArray[np.int32]
    ids: NDArray[Any]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Return (D,) tokens of each document."""
        ends = cumulative(self.lengths)
        return np.diff(ends[cumulative(self.sequences)])

    def select(
        self, order: NDArray[np.int64], keys: NDArray[np.uint64]
    ) -> tuple[DocumentBatch, Iterator[bytes]]:
        """Return documents in this order with new keys, without ids; and the bytes of their ids."""
        starts = cumulative(self.sequences)
        sequences = self.sequences[order]
        lengths = np.concatenate(
            [self.lengths[_positions(starts[block], self.sequences[block])] for block in _blocks(order)]
            or [np.empty(0, np.int32)]
        )
        documents = DocumentBatch(keys, sequences, lengths, np.empty(0, self.ids.dtype))
        return documents, self._payload(order)

    def _payload(self, order: NDArray[np.int64]) -> Iterator[bytes]:
        ends = cumulative(self.tokens) * self.ids.dtype.itemsize
        view = self.ids.data.cast("B")
        for block in _blocks(order):
            pairs = zip(ends[block].tolist(), ends[block + 1].tolist(), strict=True)
            yield b"".join([view[start:end] for start, end in pairs])


def cumulative(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the sums of the first 0, 1, ... counts."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64, copy=False)


def _blocks(order: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(order), _BLOCK_DOCUMENTS):
        yield order[start : start + _BLOCK_DOCUMENTS]


def _positions(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers from each start on, as many as its count."""
    ends = cumulative(counts)
    return np.repeat(starts - ends[:-1], counts) + np.arange(ends[-1])


def write_part(folder: Path, split: int, documents: DocumentBatch, payload: Iterator[bytes]) -> None:
    """Write sorted documents of a split."""
    columns: dict[str, NDArray[Any]] = {
        "keys": documents.keys,
        "sequences": documents.sequences,
        "lengths": documents.lengths,
    }
    for name, values in columns.items():
        with open_output(folder / f"{split}.{name}") as out:
            out.write(values.tobytes())
    with open_output(folder / f"{split}.ids") as out:
        for block in payload:
            out.write(block)


# documents, sequences and tokens of a range
Counts = tuple[int, int, int]


def sum_counts(rows: Sequence[Any]) -> Counts:
    """Add up counts."""
    documents, sequences, tokens = (sum(column) for column in zip((0, 0, 0), *rows, strict=True))
    return documents, sequences, tokens


def bucket_counts(documents: DocumentBatch, tokens: NDArray[np.int64], buckets: int) -> list[Counts]:
    """Count the sorted documents of each bucket: an equal part of the range of the keys.

    Args:
        tokens: (D,) of each document.
    """
    edges = np.array([(number << 64) // buckets for number in range(1, buckets)], np.uint64)
    ends = np.concatenate([[0], np.searchsorted(documents.keys, edges, "left"), [len(documents.keys)]])
    columns = (np.diff(ends), *(np.diff(cumulative(c)[ends]) for c in (documents.sequences, tokens)))
    return [tuple(row) for row in np.stack(columns, 1).tolist()]


def read_part(
    folder: Path, split: int, dtype: np.dtype[Any], before: Counts, counts: Counts
) -> DocumentBatch:
    """Read a range of the documents of a part.

    Args:
        before: counts of the documents before the range.
    """

    def column(name: str, kind: Any, number: int) -> NDArray[Any]:
        size = np.dtype(kind).itemsize
        path = folder / f"{split}.{name}"
        return np.fromfile(path, kind, counts[number], offset=before[number] * size)

    return DocumentBatch(
        column("keys", np.uint64, 0),
        column("sequences", np.int64, 0),
        column("lengths", np.int32, 1),
        column("ids", dtype, 2),
    )


def concatenate(parts: Sequence[DocumentBatch], dtype: np.dtype[Any]) -> DocumentBatch:
    """Concatenate documents; there may be none."""
    empty = (np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, dtype))
    columns = zip(*((part.keys, part.sequences, part.lengths, part.ids) for part in parts), strict=True)
    arrays = [np.concatenate(column) for column in columns] or empty
    return DocumentBatch(*arrays)
