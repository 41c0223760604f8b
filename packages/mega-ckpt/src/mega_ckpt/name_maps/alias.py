"""Foreign tensor layouts as lists of aliases, read in both directions.

A list gives the name and the arrangement in which another program stores each parameter. Both directions of a
conversion read the same list, so the round trip is exact by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mega_schema.params import Param
from mega_schema.sharding import Shape, Slab


@dataclass(frozen=True, slots=True)
class TensorAlias:
    """A foreign tensor and the part of a parameter that it stores.

    Attributes:
        foreign, ours: the foreign name and the parameter's name.
        block: number of the block of the row's `Split` that the foreign tensor contains; None: the
            whole parameter.
        transpose: the foreign tensor is stored transposed.
        order: the parameter's rows are foreign[order]; None if the order is the same. Applied after the
            transposition.
    """

    foreign: str
    ours: str
    block: int | None = None
    transpose: bool = False
    order: tuple[int, ...] | None = None

    def slab(self, row: Param) -> Slab:
        """Return the box of the parameter that the foreign tensor fills."""
        start = [0] * len(row.shape)
        shape = list(row.shape)
        if self.block is not None:
            assert row.split is not None
            blocks = row.split.blocks
            dim = row.split.dim
            start[dim] = sum(blocks[: self.block])
            shape[dim] = blocks[self.block]
        return Slab(tuple(start), tuple(shape), tuple(start))

    def unsharded_tensor(self, row: Param) -> ForeignTensor:
        """Return the foreign tensor as stored without tensor parallelism."""
        box = self.slab(row)
        shape = box.shape[::-1] if self.transpose else box.shape
        boxes = (Slab(box.start, box.shape, (0,) * len(box.shape)),)
        return ForeignTensor(self.foreign, self.ours, shape, boxes, self.transpose, self.order)

    def rank_shard(self, row: Param, rank: int, tp: int) -> ForeignTensor:
        """Return the foreign tensor of rank `rank` of `tp`; `order` is of the rank's rows.

        Raises:
            LayoutError: the parameter cannot be split this way.
        """
        boxes = row.slabs(rank, tp)
        shape = row.local_shape(tp)
        if self.block is not None:
            assert row.split is not None
            dim = row.split.dim
            (box,) = boxes[self.block : self.block + 1]
            boxes = (Slab(box.start, box.shape, (0,) * len(box.shape)),)
            shape = (*shape[:dim], box.shape[dim], *shape[dim + 1 :])
        return ForeignTensor(
            self.foreign,
            self.ours,
            shape[::-1] if self.transpose else shape,
            boxes,
            self.transpose,
            self.order,
        )


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor as a foreign file stores it, and the boxes of a parameter that fill it.

    Attributes:
        name: key in the foreign file.
        shape: shape in the foreign file.
        boxes: boxes of the parameter; `at` is where each begins in the tensor in the parameter's arrangement.
            Rows that no box fills are padding.
        transpose, order: as in `TensorAlias`.
    """

    name: str
    ours: str
    shape: Shape
    boxes: tuple[Slab, ...]
    transpose: bool = False
    order: tuple[int, ...] | None = None

    def select(self, stored: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Select values of the tensor, in the parameter's arrangement.

        Args:
            stored: the whole tensor, as it is stored.
            at: index in the parameter's arrangement.
        """
        arranged = stored.T if self.transpose else stored
        part: np.ndarray = arranged[self._index(index)]
        return part

    def assemble(self, dtype: np.dtype[Any], read: Callable[[Slab], np.ndarray]) -> np.ndarray:
        """Build the tensor as it is stored, with zero padding.

        Args:
            read: reads a box of the parameter in this dtype; called for a few rows at a time.
        """
        out = np.zeros(self.shape, dtype)
        arranged = out.T if self.transpose else out
        for box in self.boxes:
            for rows in split_rows(box, dtype.itemsize):
                arranged[self._index(rows.in_local)] = read(rows)
        return out

    def _index(self, index: tuple[slice, ...]) -> tuple[Any, ...]:
        """Convert an index of the parameter's arrangement to one of the foreign tensor."""
        return index if self.order is None else (np.asarray(self.order[index[0]]), *index[1:])


_PART_BYTES = 1 << 26  # bytes of a parameter that are copied at once


def split_rows(box: Slab, width: int) -> Iterator[Slab]:
    """Split the box into boxes of a few rows.

    Args:
        width: bytes of a number.
    """
    if not box.shape:
        yield box
        return
    rows, *row_shape = box.shape
    step = max(1, _PART_BYTES // max(1, width * math.prod(row_shape)))
    for first in range(0, rows, step):
        start, local_start = (
            (box.start[0] + first, *box.start[1:]),
            (box.local_start[0] + first, *box.local_start[1:]),
        )
        yield Slab(start, (min(step, rows - first), *row_shape), local_start)


def consecutive_ranges(numbers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of consecutive numbers: the first, its position, and the length."""
    position = 0
    for part in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        if part.size:
            yield int(part[0]), position, int(part.size)
        position += part.size


_TRANSPOSED_ROWS = 64  # rows of a transposed array read at once: a cache line has elements of several


def copy_values(out: np.ndarray, part: np.ndarray) -> None:
    """Copy `part` into `out`; a transposed part is copied in blocks, for the cache."""
    if part.ndim != 2 or part.strides[0] >= part.strides[1]:
        out[...] = part
        return
    for first in range(0, len(out), _TRANSPOSED_ROWS):
        rows = slice(first, first + _TRANSPOSED_ROWS)
        out[rows] = np.ascontiguousarray(part[rows].T).T


def whole_slab(shape: Shape) -> Slab:
    """Return the box of the whole tensor; a fused parameter's slabs are one per block even on one rank."""
    zero = (0,) * len(shape)
    return Slab(zero, shape, zero)
