"""Foreign layouts as lists of aliases, read in both directions.

A list says under which name, and in which arrangement, another program keeps each parameter. Converting to
ours and converting back read the same list, so the round trip is exact by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mega_schema.params import Param
from mega_schema.shard import Shape, Slab


@dataclass(frozen=True, slots=True)
class Alias:
    """One foreign tensor and the place it has in a parameter of ours.

    Attributes:
        foreign, ours: the two names.
        block: number of the run of the row's `Split` that the foreign tensor is; None when it is the whole
            parameter.
        transpose: the foreign tensor has its two dimensions the other way round.
        order: the rows of ours are foreign[order]; None when the order is the same. Applied after the
            transposition.
    """

    foreign: str
    ours: str
    block: int | None = None
    transpose: bool = False
    order: tuple[int, ...] | None = None

    def slab(self, row: Param) -> Slab:
        """The box of our parameter that the foreign tensor fills."""
        start, shape = [0] * len(row.shape), list(row.shape)
        if self.block is not None:
            assert row.split is not None
            runs, dim = row.split.blocks, row.split.dim
            start[dim], shape[dim] = sum(runs[: self.block]), runs[self.block]
        return Slab(tuple(start), tuple(shape), tuple(start))

    def whole(self, row: Param) -> Foreign:
        """The foreign tensor of a program that cuts none."""
        box = self.slab(row)
        shape = box.shape[::-1] if self.transpose else box.shape
        boxes = (Slab(box.start, box.shape, (0,) * len(box.shape)),)
        return Foreign(self.foreign, self.ours, shape, boxes, self.transpose, self.order)

    def of_rank(self, row: Param, rank: int, tp: int) -> Foreign:
        """The foreign tensor that rank `rank` of `tp` has, cut as ours are; `order` is of the rank's rows.

        Raises:
            LayoutError: the parameter cannot be cut so.
        """
        boxes, shape = row.slabs(rank, tp), row.local_shape(tp)
        if self.block is not None:
            assert row.split is not None
            dim, (box,) = row.split.dim, boxes[self.block : self.block + 1]
            boxes = (Slab(box.start, box.shape, (0,) * len(box.shape)),)
            shape = (*shape[:dim], box.shape[dim], *shape[dim + 1 :])
        return Foreign(
            self.foreign,
            self.ours,
            shape[::-1] if self.transpose else shape,
            boxes,
            self.transpose,
            self.order,
        )


@dataclass(frozen=True, slots=True)
class Foreign:
    """One tensor as a foreign file has it, and the boxes of a parameter of ours that fill it.

    Attributes:
        name: its key there.
        shape: as it is there.
        boxes: of ours; `at` is where each begins in the tensor, once that is arranged as ours is. Rows
            that no box fills are padding.
        transpose, order: as in `Alias`.
    """

    name: str
    ours: str
    shape: Shape
    boxes: tuple[Slab, ...]
    transpose: bool = False
    order: tuple[int, ...] | None = None

    def part(self, stored: np.ndarray, at: tuple[slice, ...]) -> np.ndarray:
        """Numbers of the tensor, arranged as ours are.

        Args:
            stored: the whole of it, as it is there.
            at: which, in the arrangement of ours.
        """
        arranged = stored.T if self.transpose else stored
        part: np.ndarray = arranged[self._at(at)]
        return part

    def assembled(self, dtype: np.dtype[Any], read: Callable[[Slab], np.ndarray]) -> np.ndarray:
        """The tensor as it is there, padding zero.

        Args:
            read: gives a box of ours in this dtype; asked for a few rows at a time.
        """
        out = np.zeros(self.shape, dtype)
        arranged = out.T if self.transpose else out
        for box in self.boxes:
            for some in in_parts(box, dtype.itemsize):
                arranged[self._at(some.in_local)] = read(some)
        return out

    def _at(self, at: tuple[slice, ...]) -> tuple[Any, ...]:
        """Numbers of ours, as an index of the foreign tensor."""
        return at if self.order is None else (np.asarray(self.order[at[0]]), *at[1:])


_PART = 1 << 26  # bytes of a parameter that are on their way at once


def in_parts(box: Slab, width: int) -> Iterator[Slab]:
    """The box a few rows at a time.

    Args:
        width: bytes of a number.
    """
    if not box.shape:
        yield box
        return
    rows, *rest = box.shape
    step = max(1, _PART // max(1, width * math.prod(rest)))
    for first in range(0, rows, step):
        start, at = (box.start[0] + first, *box.start[1:]), (box.at[0] + first, *box.at[1:])
        yield Slab(start, (min(step, rows - first), *rest), at)


def runs(numbers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Runs of numbers one after another: the first, its place among all, and how many."""
    at = 0
    for some in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        if some.size:
            yield int(some[0]), at, int(some.size)
        at += some.size


_ROWS = 64  # of a transposed array that are read at once: a line of the cache holds some of each


def copy(out: np.ndarray, part: np.ndarray) -> None:
    """out[...] = part. A transposed part is not walked down its columns: each number would miss the cache."""
    if part.ndim != 2 or part.strides[0] >= part.strides[1]:
        out[...] = part
        return
    for first in range(0, len(out), _ROWS):
        some = slice(first, first + _ROWS)
        out[some] = np.ascontiguousarray(part[some].T).T


def whole_slab(shape: Shape) -> Slab:
    """The box that is the whole tensor; a fused parameter's slabs are one per run even on one rank."""
    zero = (0,) * len(shape)
    return Slab(zero, shape, zero)
