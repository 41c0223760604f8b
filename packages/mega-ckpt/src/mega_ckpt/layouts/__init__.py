"""Foreign layouts as lists of aliases, read in both directions.

A list says under which name, and in which arrangement, another program keeps each parameter. Converting to
ours and converting back read the same list, so the round trip is exact by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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

    def foreign_shape(self, row: Param) -> Shape:
        """Shape of the foreign tensor."""
        shape = self.slab(row).shape
        return shape[::-1] if self.transpose else shape

    def to_ours(self, foreign: np.ndarray) -> np.ndarray:
        """The box of our parameter, from the foreign tensor."""
        ours = foreign.T if self.transpose else foreign
        return ours if self.order is None else ours[list(self.order)]

    def to_foreign(self, ours: np.ndarray) -> np.ndarray:
        """The foreign tensor, from the box of our parameter."""
        if self.order is not None:
            ours = ours[np.argsort(self.order)]
        return ours.T if self.transpose else ours


def whole_slab(shape: Shape) -> Slab:
    """The box that is the whole tensor; a fused parameter's slabs are one per run even on one rank."""
    zero = (0,) * len(shape)
    return Slab(zero, shape, zero)


def by_parameter(aliases: Iterable[Alias]) -> dict[str, list[Alias]]:
    """The aliases of each of our parameters."""
    found: dict[str, list[Alias]] = {}
    for alias in aliases:
        found.setdefault(alias.ours, []).append(alias)
    return found


def gather(row: Param, aliases: Iterable[Alias], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """One whole parameter of ours from the foreign tensors that make it up; dtype of the first of them."""
    parts = [(alias.slab(row), alias.to_ours(read(alias.foreign))) for alias in aliases]
    out = np.empty(row.shape, parts[0][1].dtype)
    for slab, values in parts:
        out[slab.in_global] = values
    return out


def scatter(
    rows: Mapping[str, Param], aliases: Iterable[Alias], read: Callable[[str, Slab], np.ndarray]
) -> dict[str, np.ndarray]:
    """Every foreign tensor, from a source of boxes of our parameters."""
    return {a.foreign: a.to_foreign(read(a.ours, a.slab(rows[a.ours]))) for a in aliases}
