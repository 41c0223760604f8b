"""Integer arithmetic of tensors split over an axis of the mesh.

`Split` is the rule in a parameter's row, `Slab` is a box of the global tensor with its place in a local one,
`overlaps` finds the intersections of boxes. Loading, saving and resharding need only these three: weights
move between layouts without building a model or gathering a tensor.
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
    """The dimension `dim` is split over the mesh axis `axis`.

    Attributes:
        axis: name of the mesh axis ("tp").
        dim: the dimension that is split.
        blocks: lengths of the blocks along `dim` that are split one by one, in order (Q|K|V, gate|up); empty
            if the dimension is one block. A rank holds its shard of every block, one after another.
        pad: a rank's shard is rounded up to a multiple of this, and the last ranks hold rows past the end of
            the global tensor (a vocabulary). 0: the dimension must divide.
        unit: splits fall between units of this many rows (the rows of one head).
        repeats: numbers of the blocks that may have fewer units than there are ranks, if their number divides
            the ranks. Each unit is then replicated on neighbouring ranks (key and value heads under query
            heads).
    """

    axis: str
    dim: int
    blocks: tuple[int, ...] = ()
    pad: int = 0
    unit: int = 1
    repeats: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of a global tensor and its place in a local one.

    Attributes:
        start: first index of the box in the global tensor, one per dimension.
        shape: extent of the box.
        local_start: first index of the box in the local tensor.
    """

    start: Shape
    shape: Shape
    local_start: Shape

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element, like a rank's shard of padding rows only."""
        return 0 in self.shape

    @property
    def in_global(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))

    @property
    def in_local(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.local_start, self.shape, strict=True))


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


@dataclass(frozen=True, slots=True)
class ReplicatedRange:
    """Elements that neighbouring ranks of an axis replicate, each with a partial gradient.

    Attributes:
        begin, end: flat offsets in a rank's local tensor; the same on every rank.
        head_replicas: ranks that hold a copy; the first of these neighbours saves it.
    """

    begin: int
    end: int
    head_replicas: int


def block_lengths(name: str, shape: Shape, split: Split, ranks: int) -> tuple[int, ...]:
    """Return the length of one rank's shard of every block, padding included; the same on every rank.

    Raises:
        LayoutError: the dimension, or one of its blocks, does not divide over the ranks.
    """
    lengths = split.blocks or (shape[split.dim],)
    if split.pad:
        return tuple(-(-block // (ranks * split.pad)) * split.pad for block in lengths)
    units = [block // split.unit for block in lengths]
    assert all(n * split.unit == block for n, block in zip(units, lengths, strict=True)), (
        f"{name}: whole units"
    )
    if not all(_is_divisible(units, split, ranks)):
        raise _split_error(name, units, split, ranks)
    return tuple(max(1, n // ranks) * split.unit for n in units)


def local_shape(name: str, shape: Shape, split: Split | None, ranks: int) -> Shape:
    """Return the shape of one rank's shard of a tensor, padding included; the same on every rank.

    Raises:
        LayoutError: the dimension, or one of its blocks, does not divide over the ranks.
    """
    if split is None:
        return shape
    return _with_dim(shape, split.dim, sum(block_lengths(name, shape, split, ranks)))


def slabs(name: str, shape: Shape, split: Split | None, rank: int, ranks: int) -> tuple[Slab, ...]:
    """Return the boxes of the global tensor `name` that rank `rank` of `ranks` holds, in their local order.

    The boxes of all ranks cover the tensor; two that overlap are equal (replicated). Empty boxes are left
    out.

    Raises:
        LayoutError: the dimension, or one of its blocks, does not divide over the ranks.
    """
    return tuple(box for box, _ in _boxes(name, shape, split, rank, ranks))


def saved_boxes(name: str, shape: Shape, split: Split | None, rank: int, ranks: int) -> tuple[Slab, ...]:
    """Return the boxes of `slabs` that the rank owns (saving, norms): over all ranks, every element once."""
    return tuple(box for box, replicas in _boxes(name, shape, split, rank, ranks) if rank % replicas == 0)


def replicated_range(name: str, shape: Shape, split: Split | None, ranks: int) -> ReplicatedRange | None:
    """Return the elements of a split tensor that several ranks hold; None if every element is on one rank.

    Raises:
        LayoutError: the dimension, or one of its blocks, does not divide over the ranks.
    """
    if split is None or not split.repeats:
        return None
    assert split.dim == 0, f"{name}: repeated units are whole rows"
    lengths = block_lengths(name, shape, split, ranks)
    row_elements = math.prod(shape[1:])
    replicas = [_head_replicas(split, block, ranks) for block in split.blocks]
    replicated = [number for number, n in enumerate(replicas) if n > 1]
    if not replicated:
        return None
    first = replicated[0]
    last = replicated[-1]
    assert len({replicas[number] for number in range(first, last + 1)}) == 1, f"{name}: blocks side by side"
    return ReplicatedRange(
        sum(lengths[:first]) * row_elements, sum(lengths[: last + 1]) * row_elements, replicas[first]
    )


def _boxes(name: str, shape: Shape, split: Split | None, rank: int, ranks: int) -> Iterator[tuple[Slab, int]]:
    """Yield a rank's boxes, and how many ranks hold each."""
    zero = (0,) * len(shape)
    if split is None:
        yield Slab(zero, shape, zero), ranks
        return
    lengths = split.blocks or (shape[split.dim],)
    begin = 0
    local_begin = 0
    for block, shard_rows in zip(lengths, block_lengths(name, shape, split, ranks), strict=True):
        replicas = _head_replicas(split, block, ranks)
        shard = rank // replicas
        first, last = min(shard * shard_rows, block), min((shard + 1) * shard_rows, block)
        box = Slab(
            _with_dim(zero, split.dim, begin + first),
            _with_dim(shape, split.dim, last - first),
            _with_dim(zero, split.dim, local_begin),
        )
        if not box.is_empty:
            yield box, replicas
        begin += block
        local_begin += shard_rows


def _head_replicas(split: Split, block: int, ranks: int) -> int:
    """Return how many ranks hold one unit of the block; divisibility was checked before."""
    return 1 if split.pad else max(1, ranks * split.unit // block)


def overlap(a_start: Shape, a_shape: Shape, b_start: Shape, b_shape: Shape) -> Overlap | None:
    """Return the intersection of two boxes of one global tensor, or None if it is empty."""
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
    """Yield the number of every box of `have` that intersects `want`, and the intersection (a is `want`)."""
    for number, box in enumerate(have):
        shared = overlap(want.start, want.shape, box.start, box.shape)
        if shared is not None:
            yield number, shared


def _is_divisible(units: Sequence[int], split: Split, ranks: int) -> list[bool]:
    """Return for each block whether its units can be split over the ranks."""
    return [n % ranks == 0 or (i in split.repeats and ranks % n == 0) for i, n in enumerate(units)]


def _split_error(name: str, units: Sequence[int], split: Split, ranks: int) -> LayoutError:
    worst = units[_is_divisible(units, split, ranks).index(False)]
    degrees = [n for n in range(1, max(units) + 1) if all(_is_divisible(units, split, n))]
    max_degree = degrees[-1]
    divisors = [n for n in range(1, max_degree + 1) if max_degree % n == 0]
    return LayoutError(
        name,
        f"{worst} {'rows' if split.unit == 1 else 'heads'} cannot be split evenly over {split.axis}",
        found=f"{split.axis}={ranks}",
        wanted=f"a divisor of {max_degree}"
        if degrees == divisors
        else f"one of {', '.join(map(str, degrees))}",
        hint=f"--{_FLAGS.get(split.axis, split.axis)} {max(n for n in degrees if n <= ranks)}",
    )


_FLAGS: Mapping[str, str] = MappingProxyType(
    {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}
)


def _with_dim(shape: Shape, dim: int, value: int) -> Shape:
    return *shape[:dim], value, *shape[dim + 1 :]
