"""Layout of gradient buckets, and the range of each that a replica owns. Integers only.

The backward pass goes from the last parameter to the first, so buckets are filled in that order: the first
one is complete, and its reduction starts, while the rest of the pass runs (arXiv:2006.15704 §3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mega_schema.params import Param

DEFAULT_BUCKET_ELEMENTS = 40_000_000  # Megatron's, for up to 40 replicas
ALIGNMENT = 64  # elements; a GPU reads weights aligned to 128 bytes at full speed


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """The sharding of the model's state over its replicas.

    Attributes:
        stage: ZeRO stage: 0 shards nothing, 1 moments and main weights, 2 also gradients, 3 also weights.
        bucket_elements: elements after which a bucket of gradients is closed.
        overlap_reduce: whether gradients are reduced while the backward pass runs.
        overlap_gather: whether weights are gathered while the next forward pass runs.
        reduce_bf16: whether gradients are rounded to bfloat16 before the reduction over the replicas.
    """

    stage: int = 0
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS
    overlap_reduce: bool = False
    overlap_gather: bool = False
    reduce_bf16: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer of several parameters.

    Attributes:
        param_offsets: (number, first element) of each parameter, in the order of the backward pass.
        length: elements, with padding; every replica's shard starts aligned.
    """

    param_offsets: tuple[tuple[int, int], ...]
    length: int


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The range of a parameter's flattened local tensor whose gradient, main weight and moments a rank owns.

    Empty if other replicas own all of it.
    """

    row: Param
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def assign_buckets(
    sizes: Sequence[int], *, max_elements: int, replicas: int, separate: Collection[int] = ()
) -> tuple[Bucket, ...]:
    """Assign parameters to buckets.

    Args:
        sizes: elements of every parameter, in the order of the forward pass.
        max_elements: a bucket is closed once it has this many elements (Megatron's --ddp-bucket-size).
        separate: numbers of parameters with a bucket of their own, so that two ranks that hold one among
            different others shard it alike.
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
    """The position of a parameter in its bucket.

    Attributes:
        bucket, offset: the number of its bucket, and its first element there.
        shard: the range of it that this replica owns.
        shard_offset: the range's first element in this replica's shard of the bucket.
    """

    bucket: int
    offset: int
    shard: ShardRange
    shard_offset: int


def param_slots(
    rows: Sequence[Param], sizes: Sequence[int], buckets: Sequence[Bucket], rank: int, replicas: int
) -> list[ParamSlot]:
    """Compute the slot of every parameter, in the order of `rows`, for replica `rank` of `replicas`."""
    slots: dict[int, ParamSlot] = {}
    for bucket, layout in enumerate(buckets):
        start_of_shard, end_of_shard = shard_range(layout.length, rank, replicas)
        for number, begin in layout.param_offsets:
            start, stop = owned_range(begin, sizes[number], start_of_shard, end_of_shard)
            shard_offset = begin + start - start_of_shard if start < stop else 0
            slots[number] = ParamSlot(bucket, begin, ShardRange(rows[number], start, stop), shard_offset)
    return [slots[number] for number in range(len(rows))]


def shard_range(length: int, rank: int, replicas: int) -> tuple[int, int]:
    """Return the range of a bucket that a replica owns."""
    shard_elements = length // replicas
    return rank * shard_elements, (rank + 1) * shard_elements


def owned_range(begin: int, size: int, start_of_shard: int, end_of_shard: int) -> tuple[int, int]:
    """Intersect a parameter at `begin` with a shard; returns the range within the parameter."""
    start = max(begin, start_of_shard)
    end = min(begin + size, end_of_shard)
    return (start - begin, end - begin) if start < end else (0, 0)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
