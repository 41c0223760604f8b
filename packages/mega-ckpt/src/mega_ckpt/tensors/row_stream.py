"""Stream a tensor in chunks of rows, first to last, from any pieces.

The rows of a piece are contiguous in its file, so every piece is read once, sequentially, and its checksum is
verified at the end. Files are read, not mapped: one chunk is in memory.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mega_schema.checkpoint.reader import DTYPES, Checkpoint, TensorPiece
from mega_schema.checkpoint.side_files import OTHER_ITERATION
from mega_schema.errors import CorruptFileError, FormatError
from mega_schema.sharding import Shape, Slab

CHUNK_BYTES = 1 << 22  # bytes of a chunk; a longer row is a chunk by itself


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Consecutive rows of a tensor in the stored dtype; bfloat16 as uint16 bits.

    Attributes:
        first: number of the first row.
        values: (rows, *shape[1:]); valid until the next chunk is requested.
    """

    first: int
    values: np.ndarray


ReadRows = Callable[[str, str], Iterator[RowChunk]]  # reads a tensor's rows, given namespace and name


def rows_per_chunk(shape: Shape, dtype: str) -> int:
    """Return the number of rows in a chunk of a tensor."""
    return max(1, CHUNK_BYTES // max(1, math.prod(shape[1:]) * DTYPES[dtype].itemsize))


def row_slabs(shape: Shape, rows: int) -> Iterator[Slab]:
    """Yield boxes of `rows` rows, each as the whole of a local tensor."""
    zero = (0,) * len(shape)
    for first in range(0, shape[0], rows):
        yield Slab((first, *zero[1:]), (min(rows, shape[0] - first), *shape[1:]), zero)


def stream_rows(checkpoint: Checkpoint, space: str, name: str, rows: int | None = None) -> Iterator[RowChunk]:
    """Stream the rows of a tensor whose pieces cover it (checked by `verify.check_cover`).

    Args:
        rows: number of rows in each chunk but the last; None: the rows of about CHUNK_BYTES.

    Raises:
        FormatError: a checksum does not match.
    """
    tensor = checkpoint.tensors[space][name]
    step = min(tensor.shape[0], rows or rows_per_chunk(tensor.shape, tensor.dtype))
    out = np.empty((step, *tensor.shape[1:]), DTYPES[tensor.dtype])
    waiting = sorted(tensor.pieces, key=lambda piece: piece.start[0], reverse=True)
    reading: list[PieceReader] = []
    try:
        for first in range(0, tensor.shape[0], step):
            past = min(first + step, tensor.shape[0])
            active, reading = reading, []
            for reader in active:
                _read_rows(reader, out, first, past, reading)
            # a piece that ends in this chunk is closed before the next is opened: there may be thousands
            while waiting and waiting[-1].start[0] < past:
                _read_rows(PieceReader(checkpoint, space, name, waiting.pop()), out, first, past, reading)
            yield RowChunk(first, out[: past - first])
    finally:
        for reader in reading:
            reader.close()


class PieceReader:
    """Reads a piece from its first byte to its last."""

    def __init__(self, checkpoint: Checkpoint, space: str, name: str, piece: TensorPiece) -> None:
        self.piece = piece
        self._path = checkpoint.folder / piece.file
        self._where = f"{self._path}: {space} {name}"
        self._offset = piece.offset
        self._checksum = 0
        self._descriptor = os.open(self._path, os.O_RDONLY)

    def read_into(self, into: memoryview) -> None:
        """Read the next bytes, as many as `into` holds.

        Raises:
            FormatError: the file ends early.
        """
        filled = 0
        while filled < len(into):
            try:
                count = os.preadv(self._descriptor, [into[filled:]], self._offset + filled)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if not count:
                raise CorruptFileError(self._path, "ends early", found=f"{self._offset + filled} bytes")
            filled += count
        self._checksum = zlib.crc32(into, self._checksum)
        self._offset += filled

    def finish(self) -> None:
        """Close the file and verify the checksum, after all bytes were read.

        Raises:
            FormatError: the checksum does not match.
        """
        self.close()
        assert self._offset == self.piece.offset + self.piece.bytes, (
            f"{self._where}: read up to {self._offset}"
        )
        if self._checksum != self.piece.crc32:
            raise FormatError(
                self._where,
                "values are not those that were written: crc32",
                found=f"{self._checksum:08x}",
                wanted=f"{self.piece.crc32:08x}",
                hint=f"copy the file again, or {OTHER_ITERATION}",
            )

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _read_rows(
    reader: PieceReader, out: np.ndarray, first: int, past: int, unfinished: list[PieceReader]
) -> None:
    """Read a piece's rows from `first` up to `past`; append the reader to `unfinished` if more follow."""
    piece = reader.piece
    unfinished.append(reader)  # otherwise it would stay open if the read fails
    end = piece.start[0] + piece.shape[0]
    rows = slice(max(first, piece.start[0]) - first, min(past, end) - first)
    target = out[(rows, *(slice(s, s + n) for s, n in zip(piece.start[1:], piece.shape[1:], strict=True)))]
    if target.flags.c_contiguous:
        reader.read_into(as_bytes(target))
    else:
        values = np.empty(target.shape, out.dtype)
        reader.read_into(as_bytes(values))
        target[...] = values
    if end <= past:
        unfinished.pop()
        reader.finish()


def as_bytes(values: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, without a copy if it is already in C order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
