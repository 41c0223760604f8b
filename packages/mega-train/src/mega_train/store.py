"""A training run's state to and from a checkpoint, every rank its own share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mega_model.build import fill
from mega_model.mesh import Mesh
from mega_model.runtime import Runtime
from mega_model.stage import Decoder
from mega_schema.checkpoint import MODEL, Box, Checkpoint, boxes
from mega_schema.commit import Save
from mega_schema.config import to_toml
from mega_schema.params import Param
from mega_schema.shard import Slab
from mega_train.config import Run
from mega_train.optim import AdamW

_STORED: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
)


def save(
    run: Run,
    mesh: Mesh,
    rt: Runtime,
    held: list[tuple[Param, nn.Parameter]],
    adam: AdamW,
    *,
    iteration: int,
    state: dict[str, Any],
    tokenizer: Path | None,
) -> None:
    """Write a checkpoint of this iteration, all ranks together; the first replica writes."""
    assert run.checkpoint.save is not None
    saving = Save(run.checkpoint.save, iteration)
    if mesh.rank == 0:
        saving.begin()
    mesh.barrier()
    if mesh.replicas.rank == 0:
        spaces: dict[str, list[tuple[Param, Tensor]]] = {MODEL: [(row, w.detach()) for row, w in held]}
        for space, row, tensor in adam.tensors():
            spaces.setdefault(space, []).append((row, tensor))
        for space, tensors in spaces.items():
            _write(saving, space, mesh, rt, tensors)
    mesh.barrier()
    if mesh.rank == 0:
        saving.commit(
            rt.spec, layout=mesh.layout, trainer=state, tokenizer=tokenizer, run_config=to_toml(run)
        )
    mesh.barrier()


def _write(saving: Save, space: str, mesh: Mesh, rt: Runtime, tensors: list[tuple[Param, Tensor]]) -> None:
    shares = {row.name: tensor for row, tensor in tensors}
    mine: list[Box] = []
    for row, tensor in tensors:
        mine += boxes(row.name, row.shape, row.owned(rt.tp.rank, rt.tp.size), _STORED[tensor.dtype])

    def values(box: Box) -> np.ndarray:
        share = shares[box.name][box.slab.in_local].cpu()
        return (share.view(torch.uint16) if share.dtype == torch.bfloat16 else share).numpy()

    saving.write(space, mesh.rank, mine, values)


def load(checkpoint: Checkpoint, models: Sequence[Decoder], rt: Runtime) -> None:
    """Take up the weights, from the float32 main weights where the checkpoint has them."""
    for model in models:
        fill(model, _weights(checkpoint), rt)


def load_optimizer(checkpoint: Checkpoint, adam: AdamW, rt: Runtime) -> None:
    """Take up the optimizer's state; without main weights on disk, the weights are them."""
    weights = _weights(checkpoint)

    def read(space: str, row: Param, slab: Slab) -> np.ndarray:
        name = row.tied_to or row.name
        return weights(name, slab) if space == "optim.main" else checkpoint.read(space, name, slab)

    def slabs(row: Param) -> tuple[Slab, ...]:
        return row.slabs(rt.tp.rank, rt.tp.size)

    adam.load(read, slabs, steps=int(checkpoint.trainer["optimizer_steps"]))


def _weights(checkpoint: Checkpoint) -> Callable[[str, Slab], np.ndarray]:
    space = "optim.main" if "optim.main" in checkpoint.tensors else MODEL
    return lambda name, slab: checkpoint.read(space, name, slab)
