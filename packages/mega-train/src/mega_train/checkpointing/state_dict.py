"""A training run's state to and from a checkpoint, every rank its own share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from mmap import mmap
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis, Mesh
from mega_model.runtime import Runtime
from mega_schema.checkpoint.flat_ranges import fragments
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.sharding import Slab
from mega_train.distributed.bucket_layout import Stretch
from mega_train.distributed.grad_sync import Shards
from mega_train.optim.adamw import Optimizer

Read = Callable[[str, Slab], np.ndarray | Tensor]  # a box of a parameter, by name

_STORED: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a namespace that this rank writes, and its values now: a view, of the box's shape."""

    space: str
    box: BoxToWrite
    values: Tensor
    dtype: torch.dtype


def parts(mesh: Mesh, rt: Runtime, shards: Shards, optimizer: Optimizer) -> list[Part]:
    """What this rank writes of a checkpoint, which no other rank does; namespace after namespace."""
    kept = [("optim.main", part, main) for part, main in zip(shards.stretches, shards.main, strict=True)]
    writers = Axis("replicas") if shards.sharded else mesh.replicas
    found: list[Part] = []
    for _, stretch, values in kept:
        found += _parts(MODEL, stretch, values, rt.tp, writers, rt.dtype)
    for space, stretch, values in sorted([*kept, *optimizer.state()], key=_space):
        if space != "optim.main" or rt.dtype != torch.float32:
            found += _parts(space, stretch, values, rt.tp, writers, torch.float32)
    return found


def spaces(some: Iterable[Part]) -> dict[str, list[dict[str, Any]]]:
    """Their boxes as an order to write has them (`mega_schema.checkpoint.writer_process`)."""
    return {
        space: [part.box.to_record() for part in of] for space, of in groupby(some, lambda part: part.space)
    }


def stage(some: Sequence[Part], places: Sequence[int], memory: mmap) -> None:
    """Copy the values to memory, each box's to its place."""
    for part, place in zip(some, places, strict=True):
        shape = part.box.slab.shape
        there = torch.frombuffer(memory, dtype=part.dtype, count=math.prod(shape), offset=place)
        there.view(shape).copy_(part.values)


def payload(some: Iterable[Part]) -> Callable[[str, int], memoryview]:
    """Return the bytes of a namespace's box, not staged, as `writer_process.write_shards` asks for them."""
    by_space = {space: list(of) for space, of in groupby(some, lambda part: part.space)}

    def of(space: str, number: int) -> memoryview:
        part = by_space[space][number]
        return part.values.to("cpu", part.dtype).contiguous().flatten().view(torch.uint8).numpy().data

    return of


def fill(shards: Shards, read: Read, rt: Runtime) -> None:
    """Set every weight of this rank from a source of boxes of the global tensors; padding becomes zero.

    A tied parameter asks for the one it is tied to.
    """
    for stretch, main in zip(shards.stretches, shards.main, strict=True):
        _set(stretch, main, read, rt)
    shards.publish()


def weights_space(checkpoint: Checkpoint) -> str:
    """Where a checkpoint has its weights most precisely."""
    return "optim.main" if "optim.main" in checkpoint.tensors else MODEL


def weights(checkpoint: Checkpoint) -> Read:
    """The checkpoint's weights: the float32 main weights where it has them."""
    space = weights_space(checkpoint)
    return lambda name, slab: checkpoint.read(space, name, slab)


def load_optimizer(checkpoint: Checkpoint, optimizer: Optimizer, rt: Runtime) -> None:
    """Take up the optimizer's state."""

    def fill(space: str, stretch: Stretch, values: Tensor) -> None:
        _set(stretch, values, lambda name, slab: checkpoint.read(space, name, slab), rt)

    optimizer.load(fill, steps=int(checkpoint.trainer["optimizer_steps"]))


@torch.no_grad()
def _set(stretch: Stretch, values: Tensor, read: Read, rt: Runtime) -> None:
    row, tp = stretch.row, rt.tp
    values.zero_()
    for part in fragments(row.slabs(tp.rank, tp.size), row.local_shape(tp.size), stretch.begin, stretch.end):
        box = torch.as_tensor(read(row.tied_to or row.name, part.slab))
        values[part.in_range].view(part.block)[part.slab.in_local] = box.to(values)


def _parts(
    space: str, stretch: Stretch, values: Tensor, tp: Axis, writers: Axis, dtype: torch.dtype
) -> Iterator[Part]:
    """The boxes of a stretch. Of one that several replicas keep, each writes its share."""
    row = stretch.row
    first, past = (stretch.size * (writers.rank + i) // writers.size for i in (0, 1))
    begin, end = stretch.begin + first, stretch.begin + past
    for part in fragments(row.saved_boxes(tp.rank, tp.size), row.local_shape(tp.size), begin, end):
        block = values[first:past][part.in_range].view(part.block)[part.slab.in_local]
        if not part.slab.is_empty:
            yield Part(space, BoxToWrite(row.name, row.shape, part.slab, _STORED[dtype]), block, dtype)


def _space(kept: tuple[str, Stretch, Tensor]) -> str:
    return kept[0]
