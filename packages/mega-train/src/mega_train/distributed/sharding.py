"""Shard a rank's weights and gradients by the run's ZeRO stage."""

from __future__ import annotations

import torch

from mega_model.build import build_chunks
from mega_model.distributed.mesh import Mesh
from mega_model.runtime import Runtime
from mega_train.distributed.bucket_layout import ShardingConfig
from mega_train.distributed.data_parallel import build_buckets, ordered_params
from mega_train.distributed.grad_sync import ShardedGradients, ShardedWeights, tied_across_stages


def build_sharding(
    rt: Runtime, mesh: Mesh, config: ShardingConfig
) -> tuple[ShardedWeights, ShardedGradients]:
    """Build this rank's models, with uninitialised weights, and shard their weights and gradients."""
    if config.stage == 3 and mesh.replicas.size > 1:
        # imported here: FSDP2 imports DTensor and sympy, 50 MB and one second that other stages save
        from mega_train.distributed.fsdp import Fsdp2

        fsdp = Fsdp2(rt, mesh, torch.bfloat16 if config.reduce_bf16 else torch.float32)
        return fsdp, fsdp
    models = build_chunks(rt, mesh)
    separate_names = tied_across_stages(rt.table.values(), mesh)
    return build_buckets(
        ordered_params(models, rt),
        mesh.replicas,
        rt.weight_gradients,
        config,
        separate_names=separate_names,
        models=models,
    )
