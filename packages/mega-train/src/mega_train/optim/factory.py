"""The optimizer that a run names, over what a rank keeps of its parameters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from mega_model.distributed.mesh import Mesh
from mega_model.kernels.verify import KernelCheck
from mega_schema.params import ONES, Param
from mega_train.config import Run
from mega_train.config.training import Kernels
from mega_train.distributed.bucket_layout import Stretch
from mega_train.distributed.grad_sync import Shards
from mega_train.optim.adamw import SGD, AdamW, Optimizer
from mega_train.optim.apex_adamw import ApexAdamW
from mega_train.optim.muon import Muon

_LEEWAY = 16.0  # roundings of the largest weight, over all steps of a check


@dataclass(frozen=True, slots=True)
class Adam:
    """Whose AdamW a run takes, and why."""

    kind: type[AdamW]
    whose: str
    why: str


def adam(kernels: Kernels, device: torch.device) -> Adam:
    """Whose AdamW --kernels names for a device: apex's where it is asked for by name, torch's otherwise."""
    if kernels != "apex" or device.type != "cuda":
        return Adam(AdamW, "torch", "torch's fused one")
    if find_spec("amp_C") is None:
        return Adam(AdamW, "torch", "apex was built without its CUDA extensions")
    return Adam(ApexAdamW, "apex", "asked for")


def optimizer(run: Run, shards: Shards, mesh: Mesh) -> Optimizer:
    """That of --optimizer, its state zero."""
    o, kept = run.optimizer, (shards.stretches, shards.main)
    betas, kind = (o.beta1, o.beta2), adam(run.train.kernels, mesh.device).kind
    if o.name == "sgd":
        return SGD(*kept, momentum=o.sgd_momentum)
    if o.name == "adam":
        return kind(*kept, betas=betas, eps=o.eps)
    return Muon(
        *kept,
        momentum=o.muon_momentum,
        betas=betas,
        eps=o.eps,
        tp=mesh.tp,
        replicas=mesh.replicas,
        sharded=shards.sharded,
        dtype=torch.bfloat16 if run.train.bf16 else torch.float32,
        adam=kind,
    )


def checked_adam(kind: type[AdamW], device: torch.device) -> KernelCheck:
    """Three steps of it against arXiv:1711.05101, algorithm 2, in float64 on the CPU."""
    random, began = torch.Generator().manual_seed(1), time.perf_counter()
    rows = (Param("matrix", (33, 65), 0, ONES), Param("norm", (65,), 0, ONES, decay=False))
    start = [torch.randn(row.shape, generator=random).flatten() for row in rows]
    given = [[torch.randn(len(each), generator=random) for each in start] for _ in range(3)]
    mains = [each.to(device, copy=True) for each in start]
    try:
        stretches = [Stretch(row, 0, len(each)) for row, each in zip(rows, start, strict=True)]
        made = kind(stretches, mains, betas=(0.9, 0.95), eps=1e-8)
        for gradients in given:
            made.step([each.to(device) for each in gradients], 0.01, 0.1)
        got = [main.cpu().double() for main in mains]
    except Exception as error:  # whatever a package's kernel can raise is the answer
        failure = f"{type(error).__name__}: {error}"
        return KernelCheck("adamw", time.perf_counter() - began, float("inf"), failure)
    seconds, worst = time.perf_counter() - began, 0.0
    for number, (row, main) in enumerate(zip(rows, start, strict=True)):
        wanted = _adamw(main.double(), [each[number].double() for each in given], 0.1 * row.decay)
        allowed = _LEEWAY * torch.finfo(torch.float32).eps * float(wanted.abs().max())
        share = float((got[number] - wanted).abs().max()) / allowed
        worst = max(worst, share if share == share else float("inf"))
    return KernelCheck("adamw", seconds, worst)


def _adamw(weight: Tensor, gradients: list[Tensor], decay: float) -> Tensor:
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient.square()
        root = (second / (1 - 0.95**step)).sqrt() + 1e-8
        weight = weight - 0.01 * (decay * weight + first / (1 - 0.9**step) / root)
    return weight
