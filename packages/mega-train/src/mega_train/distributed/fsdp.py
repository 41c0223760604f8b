"""ZeRO stage 3 by torch's FSDP2: weights are sharded too, and gathered per block (arXiv:1910.02054 §5.3).

FSDP2 shards every parameter along its first dimension, gathers a block's weights for its forward and backward
pass, frees them afterwards, and reduce-scatters the gradients as each block's backward pass ends. Its float32
shards are the main weights; it rounds them when it gathers.
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
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.distributed.data_parallel import ordered_params


class Fsdp2:
    """The weights and gradients of one rank in stage 3, a `ShardedWeights` and a `ShardedGradients`.

    Attributes:
        models: the stages of this rank. Their weights are not initialised: fill `main_params`.
    """

    is_sharded = True

    def __init__(self, rt: Runtime, mesh: Mesh, reduce_dtype: torch.dtype = torch.float32) -> None:
        """Build and shard the models of a rank.

        Args:
            rt: its dtype is the dtype of the computation.
            reduce_dtype: dtype of the gradient reduction over the replicas.
        """
        # the full weights never exist: neither here nor when `main_params` is filled
        self.models = build_chunks(replace(rt, dtype=torch.float32, device=torch.device("meta")), mesh)
        group = mesh.replicas.group
        assert group is not None
        policy = MixedPrecisionPolicy(
            param_dtype=rt.dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        replicas = DeviceMesh.from_group(group, mesh.device.type)
        for model in self.models:
            for unit in (*model.layers.values(), model):
                _use_sum_reduction(fully_shard(unit, mesh=replicas, mp_policy=policy))
            model.to_empty(device=mesh.device)
        self.params = ordered_params(self.models, rt)
        self._weights = [weight for _, weight in self.params]
        self.shard_ranges = [
            _shard_range(row, row.local_shape(rt.tp.size), mesh.replicas) for row, _ in self.params
        ]
        self.main_params = [_local_tensor(weight).detach().view(-1) for weight in self._weights]
        for shard, main_param in zip(self.shard_ranges, self.main_params, strict=True):
            assert len(main_param) == shard.size, f"{shard.row.name}: FSDP cuts in another way"

    @property
    def has_local_non_finite(self) -> bool:
        """Always false: FSDP reduces gradients as they are computed, so the rank of origin is not known."""
        return False

    def zero_grad(self, num_micro_batches: int) -> None:
        for weight in self._weights:
            weight.grad = None

    def reduce(self) -> list[Tensor]:
        return [
            torch.zeros_like(main_param) if weight.grad is None else _local_tensor(weight.grad).view(-1)
            for weight, main_param in zip(self._weights, self.main_params, strict=True)
        ]

    def local_weights(self) -> Iterator[Tensor]:
        return (_local_tensor(weight) for weight in self._weights)

    def copy_main_to_model_params(self) -> None:
        """Do nothing: blocks gather from `main_params`."""

    def wait_all_gather(self) -> None:
        """Do nothing."""


def _use_sum_reduction(unit: FSDPModule) -> None:
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _local_tensor(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _shard_range(row: Param, shape: tuple[int, ...], replicas: Axis) -> ShardRange:
    """Return FSDP's shard: whole rows of the first dimension; the last replicas may have fewer or none."""
    rows = shape[0]
    width = int(np.prod(shape[1:], dtype=np.int64))
    rows_per_rank = -(-rows // replicas.size)
    first_row, end_row = (
        min(replicas.rank * rows_per_rank, rows),
        min((replicas.rank + 1) * rows_per_rank, rows),
    )
    return ShardRange(row, first_row * width, end_row * width)
