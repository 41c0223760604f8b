"""A training run's state to and from a checkpoint, every rank its own share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.mesh import Axis, Mesh
from mega_model.runtime import Runtime
from mega_schema.checkpoint import MODEL, Box, Checkpoint
from mega_schema.commit import Save
from mega_schema.config import to_toml
from mega_schema.flat import fragments
from mega_schema.shard import Slab
from mega_train.buckets import Stretch
from mega_train.config import Run
from mega_train.grads import Shards
from mega_train.optim import AdamW

Read = Callable[[str, Slab], np.ndarray | Tensor]  # a box of a parameter, by name

_STORED: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
)


def save(
    run: Run,
    mesh: Mesh,
    rt: Runtime,
    shards: Shards,
    adam: AdamW,
    *,
    iteration: int,
    state: dict[str, Any],
    tokenizer: Path | None,
) -> None:
    """Write a checkpoint of this iteration, all ranks together; each writes what no other one does."""
    assert run.checkpoint.save is not None
    saving = Save(run.checkpoint.save, iteration)
    if mesh.rank == 0:
        saving.begin()
    mesh.barrier()
    kept = [("optim.main", part, main) for part, main in zip(shards.stretches, shards.main, strict=True)]
    writers = Axis("replicas") if shards.sharded else mesh.replicas
    _write(saving, MODEL, mesh, rt, writers, kept, rt.dtype)
    for space, values in groupby(sorted([*kept, *adam.state()], key=_space), key=_space):
        if space != "optim.main" or rt.dtype != torch.float32:
            _write(saving, space, mesh, rt, writers, values, torch.float32)
    mesh.barrier()
    if mesh.rank == 0:
        saving.commit(
            rt.spec, layout=mesh.layout, trainer=state, tokenizer=tokenizer, run_config=to_toml(run)
        )
    mesh.barrier()


def fill(shards: Shards, read: Read, rt: Runtime) -> None:
    """Set every weight of this rank from a source of boxes of the global tensors; padding becomes zero.

    A tied parameter asks for the one it is tied to.
    """
    for stretch, main in zip(shards.stretches, shards.main, strict=True):
        _set(stretch, main, read, rt)
    shards.publish()


def weights(checkpoint: Checkpoint) -> Read:
    """The checkpoint's weights: the float32 main weights where it has them."""
    space = "optim.main" if "optim.main" in checkpoint.tensors else MODEL
    return lambda name, slab: checkpoint.read(space, name, slab)


def load_optimizer(checkpoint: Checkpoint, adam: AdamW, rt: Runtime) -> None:
    """Take up the optimizer's state."""

    def fill(space: str, stretch: Stretch, values: Tensor) -> None:
        _set(stretch, values, lambda name, slab: checkpoint.read(space, name, slab), rt)

    adam.load(fill, steps=int(checkpoint.trainer["optimizer_steps"]))


@torch.no_grad()
def _set(stretch: Stretch, values: Tensor, read: Read, rt: Runtime) -> None:
    row, tp = stretch.row, rt.tp
    values.zero_()
    for part in fragments(row.slabs(tp.rank, tp.size), row.local_shape(tp.size), stretch.begin, stretch.end):
        box = torch.as_tensor(read(row.tied_to or row.name, part.slab))
        values[part.in_stretch].view(part.block)[part.slab.in_local] = box.to(values)


def _write(
    saving: Save,
    space: str,
    mesh: Mesh,
    rt: Runtime,
    writers: Axis,
    kept: Iterable[tuple[str, Stretch, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Write stretches to a namespace. Of one that several replicas keep, each writes its share."""
    parts: dict[Box, Tensor] = {}
    for _, stretch, values in kept:
        row, tp = stretch.row, rt.tp
        first, past = (stretch.size * (writers.rank + i) // writers.size for i in (0, 1))
        begin, end = stretch.begin + first, stretch.begin + past
        for part in fragments(row.owned(tp.rank, tp.size), row.local_shape(tp.size), begin, end):
            block = values[first:past][part.in_stretch].view(part.block)
            parts[Box(row.name, row.shape, part.slab, _STORED[dtype])] = block[part.slab.in_local]

    def stored(box: Box) -> np.ndarray:
        values = parts[box].to("cpu", dtype)
        return (values.view(torch.uint16) if dtype == torch.bfloat16 else values).numpy()

    saving.write(space, mesh.rank, list(parts), stored)


def _space(kept: tuple[str, Stretch, Tensor]) -> str:
    return kept[0]
