"""A whole tensor in bands: some of its rows at a time, first to last, whatever pieces it lies in.

The rows of a piece lie end to end in its file. So every piece is read once, from its first byte to its last,
and its checksum is taken on the way. Files are read into memory, not mapped: what is in memory is one band.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mega_schema.checkpoint import DTYPES, Checkpoint, Piece
from mega_schema.errors import DamageError, FormatError
from mega_schema.shard import Shape, Slab

BAND = 1 << 22  # bytes; a row that is longer is a band of its own


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a whole tensor as they are stored, bfloat16 as its bits.

    Attributes:
        first: number of the first of them.
        values: (rows, *shape[1:]); they hold until the next band is asked for.
    """

    first: int
    values: np.ndarray


Bands = Callable[[str, str], Iterator[Band]]  # of a tensor, by its namespace and name


def rows_at_once(shape: Shape, dtype: str) -> int:
    """Rows of a band of a tensor."""
    return max(1, BAND // max(1, math.prod(shape[1:]) * DTYPES[dtype].itemsize))


def slabs_of_rows(shape: Shape, rows: int) -> Iterator[Slab]:
    """So many rows of a tensor at a time, each as the whole of a local one."""
    zero = (0,) * len(shape)
    for first in range(0, shape[0], rows):
        yield Slab((first, *zero[1:]), (min(rows, shape[0] - first), *shape[1:]), zero)


def stored_bands(checkpoint: Checkpoint, space: str, name: str, rows: int | None = None) -> Iterator[Band]:
    """The bands of a tensor whose pieces are known to cover it (`verify.check_cover`).

    Args:
        rows: of each band but the last; None for as many as make BAND bytes.

    Raises:
        FormatError: a piece is not what was written.
    """
    tensor = checkpoint.tensors[space][name]
    step = min(tensor.shape[0], rows or rows_at_once(tensor.shape, tensor.dtype))
    out = np.empty((step, *tensor.shape[1:]), DTYPES[tensor.dtype])
    waiting = sorted(tensor.pieces, key=lambda piece: piece.start[0], reverse=True)
    reading: list[PieceReader] = []
    try:
        for first in range(0, tensor.shape[0], step):
            past = min(first + step, tensor.shape[0])
            met, reading = reading, []
            for reader in met:
                _take(reader, out, first, past, reading)
            # one that ends in this band is closed before the next is opened: there may be thousands
            while waiting and waiting[-1].start[0] < past:
                _take(PieceReader(checkpoint, space, name, waiting.pop()), out, first, past, reading)
            yield Band(first, out[: past - first])
    finally:
        for reader in reading:
            reader.close()


class PieceReader:
    """A piece, read from its first byte to its last."""

    def __init__(self, checkpoint: Checkpoint, space: str, name: str, piece: Piece) -> None:
        self.piece, self._path = piece, checkpoint.folder / piece.file
        self._where = f"{self._path}: {space} {name}"
        self._at, self._checksum = piece.offset, 0
        self._descriptor = os.open(self._path, os.O_RDONLY)

    def take(self, into: memoryview) -> None:
        """Read the next bytes, as many as there is room for.

        Raises:
            FormatError: the file ends before.
        """
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], self._at + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if not count:
                raise DamageError(self._path, "ends early", found=f"{self._at + done} bytes")
            done += count
        self._checksum = zlib.crc32(into, self._checksum)
        self._at += done

    def end(self) -> None:
        """Close, once all of it was read.

        Raises:
            FormatError: it has not the checksum that it was written with.
        """
        self.close()
        assert self._at == self.piece.offset + self.piece.bytes, f"{self._where}: read up to {self._at}"
        if self._checksum != self.piece.crc32:
            raise FormatError(
                self._where,
                "values are not those that were written: crc32",
                found=f"{self._checksum:08x}",
                wanted=f"{self.piece.crc32:08x}",
                hint="copy the file again, or load another iteration: --load RUN/iter_NNNNNNN",
            )

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _take(reader: PieceReader, out: np.ndarray, first: int, past: int, unfinished: list[PieceReader]) -> None:
    """Read what a piece has of rows `first` up to `past`; one that has more rows goes to `unfinished`."""
    piece = reader.piece
    unfinished.append(reader)  # or it would stay open if the disk fails now
    end = piece.start[0] + piece.shape[0]
    rows = slice(max(first, piece.start[0]) - first, min(past, end) - first)
    place = out[(rows, *(slice(s, s + n) for s, n in zip(piece.start[1:], piece.shape[1:], strict=True)))]
    if place.flags.c_contiguous:
        reader.take(as_bytes(place))
    else:
        values = np.empty(place.shape, out.dtype)
        reader.take(as_bytes(values))
        place[...] = values
    if end <= past:
        unfinished.pop()
        reader.end()


def as_bytes(values: np.ndarray) -> memoryview:
    """The bytes of an array in C order, the array's own where it is in that order already."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
