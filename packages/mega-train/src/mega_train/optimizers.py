"""The optimizer that a run names, over what a rank keeps of its parameters."""

from __future__ import annotations

import torch

from mega_model.mesh import Mesh
from mega_train.config import Run
from mega_train.grads import Shards
from mega_train.muon import Muon
from mega_train.optim import SGD, AdamW, Optimizer


def optimizer(run: Run, shards: Shards, mesh: Mesh) -> Optimizer:
    """That of --optimizer, its state zero."""
    o, kept = run.optimizer, (shards.stretches, shards.main)
    betas = (o.beta1, o.beta2)
    if o.name == "sgd":
        return SGD(*kept, momentum=o.sgd_momentum)
    if o.name == "adam":
        return AdamW(*kept, betas=betas, eps=o.eps)
    return Muon(
        *kept,
        momentum=o.muon_momentum,
        betas=betas,
        eps=o.eps,
        tp=mesh.tp,
        replicas=mesh.replicas,
        sharded=shards.sharded,
        dtype=torch.bfloat16 if run.train.bf16 else torch.float32,
    )
