"""ZeRO's stage 3: weights too are cut over the replicas, and gathered by blocks (arXiv:1910.02054 §5.3).

torch's FSDP2 is the engine. It cuts every parameter along its first dimension, gathers a block's weights for
its forward and backward pass, frees them after it, and sums the gradients onto their owners as each block's
backward pass ends. What it keeps in float32 are the main weights; it rounds as it gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mega_model.build import build_chunks
from mega_model.distributed.mesh import Axis, Mesh
from mega_model.runtime import Runtime
from mega_schema.params import Param
from mega_train.distributed.bucket_layout import Stretch
from mega_train.distributed.data_parallel import ordered_params


class FullyShard:
    """The weights and gradients of one rank, stage 3 (a `grad_sync.Shards`).

    Attributes:
        models: the stages this rank holds. Their weights are not set: `main` is to be filled.
    """

    sharded = True

    def __init__(self, rt: Runtime, mesh: Mesh, reduce_dtype: torch.dtype = torch.float32) -> None:
        """
        Args:
            rt: its dtype is what blocks compute in.
            reduce_dtype: in which gradients are added up over the replicas.
        """
        # nothing is made whole: neither here nor when `main` is filled
        self.models = build_chunks(replace(rt, dtype=torch.float32, device=torch.device("meta")), mesh)
        group = mesh.replicas.group
        assert group is not None
        policy = MixedPrecisionPolicy(
            param_dtype=rt.dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        replicas = DeviceMesh.from_group(group, mesh.device.type)
        for model in self.models:
            for part in (*model.layers.values(), model):
                _sums(fully_shard(part, mesh=replicas, mp_policy=policy))
            model.to_empty(device=mesh.device)
        self.held = ordered_params(self.models, rt)
        self._weights = [weight for _, weight in self.held]
        self.stretches = [_stretch(row, row.local_shape(rt.tp.size), mesh.replicas) for row, _ in self.held]
        self.main = [_local(weight).detach().view(-1) for weight in self._weights]
        for stretch, main in zip(self.stretches, self.main, strict=True):
            assert len(main) == stretch.size, f"{stretch.row.name}: FSDP cuts in another way"

    @property
    def spoiled(self) -> bool:
        """FSDP adds gradients up as they are made, so that whose was the first is not known."""
        return False

    def begin(self, micros: int) -> None:
        for weight in self._weights:
            weight.grad = None

    def reduce(self) -> list[Tensor]:
        return [
            torch.zeros_like(main) if weight.grad is None else _local(weight.grad).view(-1)
            for weight, main in zip(self._weights, self.main, strict=True)
        ]

    def local_weights(self) -> Iterator[Tensor]:
        return (_local(weight) for weight in self._weights)

    def publish(self) -> None:
        """Nothing: blocks gather from `main`."""

    def settle(self) -> None:
        """Nothing."""


def _sums(part: FSDPModule) -> None:
    part.set_gradient_divide_factor(1.0)
    part.set_force_sum_reduction_for_comms(True)


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _stretch(row: Param, shape: tuple[int, ...], replicas: Axis) -> Stretch:
    """FSDP's cut: whole rows of the first dimension, the last replicas may have fewer or none."""
    rows, width = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    each = -(-rows // replicas.size)
    first, past = min(replicas.rank * each, rows), min((replicas.rank + 1) * each, rows)
    return Stretch(row, first * width, past * width)
