"""How a tensor is cut over an axis of the mesh, as integers.

`Split` is the rule in a parameter's row, `Slab` is a box of the global tensor together with the place it
takes in a local one, `overlaps` is where two boxes meet. Loading, saving and resharding are nothing but these
three: no model is built and no tensor is gathered to move weights between two layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mega_schema.errors import LayoutError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The dimension `dim` is cut over the mesh axis `axis`.

    Attributes:
        axis: name of the mesh axis ("tp").
        dim: the dimension that is cut.
        blocks: lengths of the runs along `dim` that are cut one by one, in order (Q|K|V, gate|up); empty when
            the dimension is one run. A rank holds its share of every run, one after another.
        pad: a rank's share is rounded up to a multiple of this, and the last ranks hold rows past the end of
            the global tensor (a vocabulary). 0 means the dimension has to divide.
        unit: the cut falls between whole units of this many rows (the rows of one head).
    """

    axis: str
    dim: int
    blocks: tuple[int, ...] = ()
    pad: int = 0
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of a global tensor and where it lies in a local one.

    Attributes:
        start: first index of the box in the global tensor, one per dimension.
        shape: extent of the box.
        at: first index of the box in the local tensor.
    """

    start: Shape
    shape: Shape
    at: Shape

    @property
    def empty(self) -> bool:
        """Whether the box holds no element, as a rank's share of padding rows alone does."""
        return 0 in self.shape

    @property
    def in_global(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))

    @property
    def in_local(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.at, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part that two boxes share: its extent, and where it begins inside each of them."""

    shape: Shape
    in_a: Shape
    in_b: Shape

    @property
    def a(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.in_a, self.shape, strict=True))

    @property
    def b(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.in_b, self.shape, strict=True))


def local_shape(name: str, shape: Shape, split: Split | None, ranks: int) -> Shape:
    """Shape of one rank's share of a tensor, padding included; the same on every rank.

    Raises:
        LayoutError: the dimension, or one of its runs, does not divide over the ranks.
    """
    if split is None:
        return shape
    share = sum(_share(name, split, run, ranks) for run in split.blocks or (shape[split.dim],))
    return *shape[: split.dim], share, *shape[split.dim + 1 :]


def slabs(name: str, shape: Shape, split: Split | None, rank: int, ranks: int) -> tuple[Slab, ...]:
    """The boxes of the global tensor `name` that rank `rank` of `ranks` holds, in their local order.

    Over all ranks the boxes cover the tensor, and no two of them meet. Empty boxes are left out.

    Raises:
        LayoutError: the dimension, or one of its runs, does not divide over the ranks.
    """
    zero = (0,) * len(shape)
    if split is None:
        return (Slab(zero, shape, zero),)
    boxes, begin, at = [], 0, 0
    for run in split.blocks or (shape[split.dim],):
        share = _share(name, split, run, ranks)
        first, last = min(rank * share, run), min((rank + 1) * share, run)
        box = Slab(
            _set(zero, split.dim, begin + first),
            _set(shape, split.dim, last - first),
            _set(zero, split.dim, at),
        )
        if not box.empty:
            boxes.append(box)
        begin, at = begin + run, at + share
    return tuple(boxes)


def overlap(a_start: Shape, a_shape: Shape, b_start: Shape, b_shape: Shape) -> Overlap | None:
    """Where two boxes of one global tensor meet, or None where they do not."""
    start = [max(a, b) for a, b in zip(a_start, b_start, strict=True)]
    stop = [min(a + n, b + m) for a, n, b, m in zip(a_start, a_shape, b_start, b_shape, strict=True)]
    extent = tuple(e - s for s, e in zip(start, stop, strict=True))
    if any(n <= 0 for n in extent):
        return None
    return Overlap(
        extent,
        tuple(s - a for s, a in zip(start, a_start, strict=True)),
        tuple(s - b for s, b in zip(start, b_start, strict=True)),
    )


def overlaps(want: Slab, have: Sequence[Slab]) -> Iterator[tuple[int, Overlap]]:
    """Every box of `have` that meets `want`: its number, and where they meet (a is `want`)."""
    for number, box in enumerate(have):
        met = overlap(want.start, want.shape, box.start, box.shape)
        if met is not None:
            yield number, met


def _share(name: str, split: Split, run: int, ranks: int) -> int:
    """Length of one rank's part of a run."""
    if split.pad:
        return -(-run // (ranks * split.pad)) * split.pad
    units, rest = divmod(run, split.unit)
    assert rest == 0, f"{name}: a run of {run} is not whole units of {split.unit}"
    if units % ranks:
        # what divides this run may not divide the others (query heads, fewer key heads)
        common = math.gcd(units, *(other // split.unit for other in split.blocks))
        raise LayoutError(
            name,
            f"{units} {'rows' if split.unit == 1 else 'heads'} cannot be cut evenly over {split.axis}",
            found=f"{split.axis}={ranks}",
            wanted=f"a divisor of {common}",
            hint=f"--{_FLAGS.get(split.axis, split.axis)} {_largest_divisor(common, ranks)}",
        )
    return run // ranks


_FLAGS: Mapping[str, str] = MappingProxyType(
    {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}
)


def _largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def _set(shape: Shape, dim: int, value: int) -> Shape:
    return *shape[:dim], value, *shape[dim + 1 :]
