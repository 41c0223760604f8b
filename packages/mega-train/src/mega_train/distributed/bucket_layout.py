"""How gradients are laid end to end in buckets, and which stretch of each a replica owns. Integers alone.

The backward pass goes from the last parameter to the first, so buckets are filled in that order: the first
is complete, and on its way to the other replicas, while the rest of the pass runs (arXiv:2006.15704 §3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mega_schema.params import Param

ALIGNMENT = 64  # elements; a GPU reads a weight that begins at a multiple of 128 bytes at full speed


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """What a run asks of the replicas of its model.

    Attributes:
        stage: ZeRO's, what is cut over them: 0 nothing, 1 moments and main weights, 2 also gradients, 3 also
            weights.
        bucket: elements after which a bucket of gradients is closed.
        overlap_reduce: whether gradients are added up while the backward pass runs.
        overlap_gather: whether weights are gathered while the next forward pass runs.
        reduce_bf16: whether gradients are rounded to bfloat16 before they are added up over the replicas.
    """

    stage: int = 0
    bucket_elements: int = 40_000_000
    overlap_reduce: bool = False
    overlap_gather: bool = False
    reduce_bf16: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer that several parameters share.

    Attributes:
        begins: of each parameter in it, its number and its first element, in the order of the backward pass.
        length: elements, with padding; every replica's share of it begins aligned.
    """

    param_offsets: tuple[tuple[int, int], ...]
    length: int


@dataclass(frozen=True, slots=True)
class ShardRange:
    """What a rank owns of a parameter's gradient, main weight and moments: a stretch of its local tensor,
    flattened. Empty where other replicas own it all."""

    row: Param
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def assign_buckets(
    sizes: Sequence[int], *, max_elements: int, replicas: int, separate: Collection[int] = ()
) -> tuple[Bucket, ...]:
    """Deal parameters to buckets.

    Args:
        sizes: elements of every parameter, in the order of the forward pass.
        most: a bucket is closed once it has this many elements (Megatron's --ddp-bucket-size).
        alone: numbers of the parameters that have a bucket to themselves: two ranks that hold the same one
            among different others then cut it alike.
    """
    buckets: list[Bucket] = []
    param_offsets: list[tuple[int, int]] = []
    length = 0

    def close() -> None:
        nonlocal length
        if param_offsets:
            buckets.append(Bucket(tuple(param_offsets), _round_up(length, ALIGNMENT * replicas)))
        param_offsets.clear()
        length = 0

    for number in reversed(range(len(sizes))):
        if number in separate:
            close()
        param_offsets.append((number, length))
        length = _round_up(length + sizes[number], ALIGNMENT)
        if length >= max_elements or number in separate:
            close()
    close()
    return tuple(buckets)


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """Where a parameter lies.

    Attributes:
        bucket, begin: the number of its bucket, and its first element there.
        stretch: what this replica owns of it.
        own: the stretch's first element in the stretch of the bucket that this replica owns.
    """

    bucket: int
    offset: int
    shard: ShardRange
    shard_offset: int


def param_slots(
    rows: Sequence[Param], sizes: Sequence[int], buckets: Sequence[Bucket], rank: int, replicas: int
) -> list[ParamSlot]:
    """Where every parameter lies, in the order of `rows`, as replica `rank` of `replicas` sees it."""
    slots: dict[int, ParamSlot] = {}
    for bucket, layout in enumerate(buckets):
        start_of_shard, end_of_shard = shard_range(layout.length, rank, replicas)
        for number, begin in layout.param_offsets:
            start, stop = owned_range(begin, sizes[number], start_of_shard, end_of_shard)
            shard_offset = begin + start - start_of_shard if start < stop else 0
            slots[number] = ParamSlot(bucket, begin, ShardRange(rows[number], start, stop), shard_offset)
    return [slots[number] for number in range(len(rows))]


def shard_range(length: int, rank: int, replicas: int) -> tuple[int, int]:
    """The stretch of a bucket that a replica owns."""
    shard_elements = length // replicas
    return rank * shard_elements, (rank + 1) * shard_elements


def owned_range(begin: int, size: int, start_of_shard: int, end_of_shard: int) -> tuple[int, int]:
    """The stretch of a parameter at `begin` that lies within `first` up to `past` of its bucket."""
    start = max(begin, start_of_shard)
    end = min(begin + size, end_of_shard)
    return (start - begin, end - begin) if start < end else (0, 0)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
