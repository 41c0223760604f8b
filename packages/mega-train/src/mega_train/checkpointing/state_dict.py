"""Convert a training run's state to and from a checkpoint; every rank handles its own shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from mmap import mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis, Mesh
from mega_model.runtime import Runtime
from mega_schema.app.config import to_toml
from mega_schema.checkpoint.flat_ranges import fragments
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.checkpoint.shard_file import BoxRecord
from mega_schema.checkpoint.writer import manifest_header, text_files
from mega_schema.checkpoint.writer_process import CommitContents
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec
from mega_schema.task_heads import HEAD
from mega_train.config import RunConfig
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.distributed.grad_sync import ShardedWeights
from mega_train.optim.base import Optimizer
from mega_train.optim.loss_scaler import DynamicLossScaler
from mega_train.resolve import ResolvedConfig

ReadWeightBox = Callable[[str, Slab], np.ndarray | Tensor]  # a box of a parameter, by name

_DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
)


@dataclass(frozen=True, slots=True)
class ShardToWrite:
    """A box of a namespace that this rank writes, and its current values: a view of the box's shape."""

    namespace: str
    box: BoxToWrite
    values: Tensor
    dtype: torch.dtype


def shards_to_write(
    mesh: Mesh, rt: Runtime, sharding: ShardedWeights, optimizer: Optimizer
) -> list[ShardToWrite]:
    """List the shards that only this rank writes, grouped by namespace."""
    main_shards = [
        ("optim.main", part, main)
        for part, main in zip(sharding.shard_ranges, sharding.main_params, strict=True)
    ]
    writers = Axis("replicas") if sharding.is_sharded else mesh.replicas
    shards: list[ShardToWrite] = []
    for _, shard_range, values in main_shards:
        shards += _boxes_to_write(MODEL, shard_range, values, rt.tp, writers, rt.dtype)
    for namespace, shard_range, values in sorted([*main_shards, *optimizer.state_shards()], key=_namespace):
        if namespace != "optim.main" or rt.dtype != torch.float32:
            shards += _boxes_to_write(namespace, shard_range, values, rt.tp, writers, torch.float32)
    return shards


def trainer_state(
    config: ResolvedConfig,
    progress: Mapping[str, int],
    lr: float,
    optimizer: Optimizer,
    loss_scaler: DynamicLossScaler,
    datasets: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of trainer.json.

    Args:
        progress: iteration and counts of samples and tokens.
        lr: the learning rate of the next step.
        datasets: a digest of each dataset, by its prefix.
    """
    return {
        **progress,
        "loss_scale": loss_scaler.state_dict(),
        "optimizer_steps": optimizer.steps,
        "seed": config.run.train.seed,
        "learning_rate": lr,
        **config.schedules.state_dict(),
        "datasets": datasets,
    }


def commit_contents(
    run: RunConfig, spec: ModelSpec, layout: Layout, trainer: Mapping[str, Any], tokenizer: Path | None
) -> CommitContents:
    """Return the part of a write order that describes the commit.

    Args:
        trainer: the content of trainer.json.
        tokenizer: folder of the tokenizer to copy.
    """
    # permissions for one start are not recorded
    recorded = replace(run, checkpoint=replace(run.checkpoint, overwrite=False, override_data=False))
    return {
        "header": manifest_header(spec, layout),
        "text_files": text_files(trainer, to_toml(recorded)),
        "tokenizer": str(tokenizer) if tokenizer else None,
        "keep_last": run.checkpoint.keep_last or int(run.checkpoint.keep_every is not None),
        "keep_every": run.checkpoint.keep_every,
    }


def namespace_boxes(shards: Iterable[ShardToWrite]) -> dict[str, list[BoxRecord]]:
    """Return the shards' boxes in the form of a write order (`mega_schema.checkpoint.writer_process`)."""
    return {
        namespace: [shard.box.to_record() for shard in group]
        for namespace, group in groupby(shards, lambda shard: shard.namespace)
    }


def copy_to_buffer(shards: Sequence[ShardToWrite], offsets: Sequence[int], buffer: mmap) -> None:
    """Copy the values of each shard to its offset in shared memory."""
    for shard, offset in zip(shards, offsets, strict=True):
        shape = shard.box.slab.shape
        target = torch.frombuffer(buffer, dtype=shard.dtype, count=math.prod(shape), offset=offset)
        target.view(shape).copy_(shard.values)


def shard_bytes(shards: Iterable[ShardToWrite]) -> Callable[[str, int], memoryview]:
    """Return a reader of the bytes of a namespace's boxes, for a writer in this process."""
    by_namespace = {
        namespace: list(group) for namespace, group in groupby(shards, lambda shard: shard.namespace)
    }

    def box_bytes(namespace: str, index: int) -> memoryview:
        shard = by_namespace[namespace][index]
        return shard.values.to("cpu", shard.dtype).contiguous().flatten().view(torch.uint8).numpy().data

    return box_bytes


def load_weights(sharding: ShardedWeights, read_box: ReadWeightBox, rt: Runtime) -> None:
    """Set every weight of this rank from boxes of the global tensors; padding becomes zero.

    A tied parameter reads the tensor it is tied to.
    """
    for shard, main_param in zip(sharding.shard_ranges, sharding.main_params, strict=True):
        _load_shard(shard, main_param, read_box, rt)
    sharding.copy_main_to_model_params()


def best_weights_namespace(checkpoint: Checkpoint) -> str:
    """Name the namespace that holds the weights at the highest precision."""
    return "optim.main" if "optim.main" in checkpoint.tensors else MODEL


def weight_reader(checkpoint: Checkpoint, spec: ModelSpec, initial: ReadWeightBox) -> ReadWeightBox:
    """Return a reader of the checkpoint's weights: the float32 main weights if it has them.

    Args:
        spec: the run's model, which may have the head of a task that the checkpoint does not have.
        initial: reads the initial values, for such a head and for a pooler that the checkpoint lacks.
    """
    namespace = best_weights_namespace(checkpoint)
    stored = checkpoint.spec
    has_head = (stored.task_head, stored.labels) == (spec.task_head, spec.labels)

    def read(name: str, slab: Slab) -> np.ndarray | Tensor:
        is_new = (name.startswith(HEAD) and not has_head) or (name.startswith("pooler") and not stored.pooler)
        return initial(name, slab) if is_new else checkpoint.read(namespace, name, slab)

    return read


def load_optimizer(checkpoint: Checkpoint, optimizer: Optimizer, rt: Runtime) -> None:
    """Load the optimizer's state from the checkpoint."""

    def fill(namespace: str, shard: ShardRange, values: Tensor) -> None:
        _load_shard(shard, values, lambda name, slab: checkpoint.read(namespace, name, slab), rt)

    optimizer.load_state(fill, steps=int(checkpoint.trainer["optimizer_steps"]))


@torch.no_grad()
def _load_shard(shard: ShardRange, values: Tensor, read_box: ReadWeightBox, rt: Runtime) -> None:
    """Fill a shard of a parameter from boxes of the global tensor."""
    row = shard.row
    tp = rt.tp
    values.zero_()
    for fragment in fragments(row.slabs(tp.rank, tp.size), row.local_shape(tp.size), shard.begin, shard.end):
        box = torch.as_tensor(read_box(row.tied_to or row.name, fragment.slab))
        values[fragment.in_range].view(fragment.block)[fragment.slab.in_local] = box.to(values)


def _boxes_to_write(
    namespace: str, shard: ShardRange, values: Tensor, tp: Axis, writers: Axis, dtype: torch.dtype
) -> Iterator[ShardToWrite]:
    """List the boxes of a shard. Replicas that own the same shard split it."""
    row = shard.row
    first_element, end_element = (shard.size * (writers.rank + i) // writers.size for i in (0, 1))
    begin, end = shard.begin + first_element, shard.begin + end_element
    for fragment in fragments(row.saved_boxes(tp.rank, tp.size), row.local_shape(tp.size), begin, end):
        block = values[first_element:end_element][fragment.in_range].view(fragment.block)[
            fragment.slab.in_local
        ]
        if not fragment.slab.is_empty:
            yield ShardToWrite(
                namespace, BoxToWrite(row.name, row.shape, fragment.slab, _DTYPE_NAMES[dtype]), block, dtype
            )


def _namespace(shard: tuple[str, ShardRange, Tensor]) -> str:
    return shard[0]
