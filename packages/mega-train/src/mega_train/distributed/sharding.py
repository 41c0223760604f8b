"""Choose how replicas share weights, gradients and optimizer state: the ZeRO stage of a run."""

from __future__ import annotations

import torch

from mega_model.build import build_chunks
from mega_model.distributed.mesh import Mesh
from mega_model.runtime import Runtime
from mega_train.distributed.bucket_layout import Sharing
from mega_train.distributed.data_parallel import Buckets, ordered_params
from mega_train.distributed.grad_sync import Shards, tied_over_stages


def build_sharding(rt: Runtime, mesh: Mesh, sharing: Sharing) -> Shards:
    """Build the models of this rank, their values not yet set, and what shares them among the replicas."""
    if sharing.stage == 3 and mesh.replicas.size > 1:
        # here, as FSDP2 imports DTensor and sympy: 50 MB and a second of a process that needs neither
        from mega_train.distributed.fsdp import FullyShard

        return FullyShard(rt, mesh, torch.bfloat16 if sharing.reduce_bf16 else torch.float32)
    models = build_chunks(rt, mesh)
    alone = tied_over_stages(rt.table.values(), mesh)
    return Buckets(
        ordered_params(models, rt), mesh.replicas, rt.weight_gradients, sharing, alone=alone, models=models
    )
