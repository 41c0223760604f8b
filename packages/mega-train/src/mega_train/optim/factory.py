"""Build the optimizer of a run over the parameters that a rank owns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from mega_model.distributed.mesh import Mesh
from mega_model.kernels.verify import KernelCheck
from mega_schema.params import ONES, Param
from mega_train.config import RunConfig
from mega_train.config.training import KernelsName
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.distributed.grad_sync import ShardedWeights
from mega_train.optim.adamw import AdamW
from mega_train.optim.apex_adamw import ApexAdamW
from mega_train.optim.base import Optimizer
from mega_train.optim.muon import Muon
from mega_train.optim.sgd import SGD

_TOLERANCE = 16.0  # in rounding errors of the largest weight, over all steps of a check


@dataclass(frozen=True, slots=True)
class AdamWChoice:
    """The implementation of AdamW, and the reason of the choice."""

    optimizer_class: type[AdamW]
    source: str
    reason: str


def choose_adamw(kernels: KernelsName, device: torch.device) -> AdamWChoice:
    """Choose the AdamW of --kernels: apex's if it is named and available, otherwise torch's."""
    if kernels != "apex" or device.type != "cuda":
        return AdamWChoice(AdamW, "torch", "torch's fused one")
    if find_spec("amp_C") is None:
        return AdamWChoice(AdamW, "torch", "apex was built without its CUDA extensions")
    return AdamWChoice(ApexAdamW, "apex", "requested")


def build_optimizer(run: RunConfig, sharding: ShardedWeights, mesh: Mesh) -> Optimizer:
    """Build the optimizer of --optimizer with zero state."""
    config = run.optimizer
    tensors = (sharding.shard_ranges, sharding.main_params)
    betas = (config.beta1, config.beta2)
    adamw_class = choose_adamw(run.train.kernels, mesh.device).optimizer_class
    if config.name == "sgd":
        return SGD(*tensors, momentum=config.sgd_momentum)
    if config.name == "adam":
        return adamw_class(*tensors, betas=betas, eps=config.eps)
    return Muon(
        *tensors,
        momentum=config.muon_momentum,
        betas=betas,
        eps=config.eps,
        tp=mesh.tp,
        replicas=mesh.replicas,
        is_sharded=sharding.is_sharded,
        dtype=torch.bfloat16 if run.train.bf16 else torch.float32,
        adamw_class=adamw_class,
    )


def check_adamw(adamw_class: type[AdamW], device: torch.device) -> KernelCheck:
    """Compare three steps with arXiv:1711.05101, algorithm 2, in float64 on the CPU."""
    random = torch.Generator().manual_seed(1)
    start_time = time.perf_counter()
    rows = (Param("matrix", (33, 65), 0, ONES), Param("norm", (65,), 0, ONES, decay=False))
    initial = [torch.randn(row.shape, generator=random).flatten() for row in rows]
    gradient_steps = [[torch.randn(len(tensor), generator=random) for tensor in initial] for _ in range(3)]
    main_params = [tensor.to(device, copy=True) for tensor in initial]
    try:
        shard_ranges = [ShardRange(row, 0, len(tensor)) for row, tensor in zip(rows, initial, strict=True)]
        optimizer = adamw_class(shard_ranges, main_params, betas=(0.9, 0.95), eps=1e-8)
        for gradients in gradient_steps:
            optimizer.step([tensor.to(device) for tensor in gradients], 0.01, 0.1)
        results = [main_param.cpu().double() for main_param in main_params]
    except Exception as error:  # any exception of a third-party kernel is the result of the check
        failure = f"{type(error).__name__}: {error}"
        return KernelCheck("adamw", time.perf_counter() - start_time, float("inf"), failure)
    seconds = time.perf_counter() - start_time
    worst = 0.0
    for index, (row, main_param) in enumerate(zip(rows, initial, strict=True)):
        expected = _reference_adamw(
            main_param.double(), [tensor[index].double() for tensor in gradient_steps], 0.1 * row.decay
        )
        allowed = _TOLERANCE * torch.finfo(torch.float32).eps * float(expected.abs().max())
        relative_error = float((results[index] - expected).abs().max()) / allowed
        worst = max(worst, relative_error if relative_error == relative_error else float("inf"))
    return KernelCheck("adamw", seconds, worst)


def _reference_adamw(weight: Tensor, gradients: list[Tensor], decay: float) -> Tensor:
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient.square()
        root = (second / (1 - 0.95**step)).sqrt() + 1e-8
        weight = weight - 0.01 * (decay * weight + first / (1 - 0.9**step) / root)
    return weight
