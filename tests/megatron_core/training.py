"""Train with Megatron Core as `pretrain_gpt.py` does, in the processes of `reference_process.run`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron_core import models

IGNORED = -100  # target of a token that does not count


def train(folder: Path, cases: list[str]) -> None:
    """Train every case of the folder, and leave what came of it on this rank beside it.

    A case is a dictionary: `args`, their command line's; `tp`, `pp`; `weights` by rank, by their names;
    `optimizer` and `schedule`, what makes theirs; `steps`, for each a list of micro-batches, which are
    dictionaries of `token`, `target` and `place`, (B, S) each, and `hidden`, (B, 1, S, S), what a token does
    not see. On two ranks `losses.pt`, of scores, becomes the losses and gradients of each rank; on one
    `assignments.pt`, of pipelines, the layers of their stages.
    """
    _without_states()
    for name in cases:
        case = torch.load(folder / f"{name}.pt", weights_only=False)
        torch.save(_train(case), folder / f"{name}-{dist.get_rank()}.pt")
    if dist.get_world_size() == 1:
        torch.save(
            [_assigned_layers(*arguments) for arguments in torch.load(folder / "assignments.pt")],
            folder / "assignments-0.pt",
        )
    else:
        torch.save(_losses(*torch.load(folder / "losses.pt")), folder / f"losses-{dist.get_rank()}.pt")


def _train(case: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state as ranks
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    args: Namespace = case["args"]
    models.begin(case["tp"], case["pp"])
    if args.sequence_parallel:
        _norms_of_own_tokens()
    torch.manual_seed(1)
    (model,) = models.build_chunks(args)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if model.post_process:
        model.output_layer.gather_output = False  # the loss is of shares of the vocabulary
    lacking, unknown = model.load_state_dict(case["weights"][dist.get_rank()], strict=False)
    assert not unknown, unknown
    assert all(name.endswith("_extra_state") for name in lacking), lacking
    model.train()
    config = model.config
    wrapped = Float16Module(config, model) if args.bf16 or args.fp16 else model
    shards = case["optimizer"].get("use_distributed_optimizer", False)
    reduced = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=shards)
    ddp = DistributedDataParallel(config, reduced, wrapped)
    optimizer = get_megatron_optimizer(OptimizerConfig(**case["optimizer"]), [ddp])
    scheduler = OptimizerParamScheduler(optimizer, **case["schedule"])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    series: dict[str, Any] = {name: [] for name in ("losses", "norms", "scales", "rates", "zeros")}
    replicas, replica = ranks.get_data_parallel_world_size(), ranks.get_data_parallel_rank()
    for number, all_micros in enumerate(case["steps"]):
        micros = all_micros[replica::replicas]
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        rows, length = micros[0]["token"].shape
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(micros),
            model=[ddp],
            num_microbatches=len(micros),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        if number == 0:
            series["gradients"] = {
                name: weight.main_grad.clone() for name, weight in model.named_parameters()
            }
        series["rates"].append(get_canonical_lr_for_logging(optimizer.param_groups))
        updated, norm, zeros = optimizer.step()
        if updated:
            scheduler.step(increment=rows * len(all_micros))
        series["scales"].append(optimizer.get_loss_scale().item())
        series["norms"].append(math.nan if norm is None else norm)
        series["zeros"].append(zeros)
        if losses:
            sums_counts = torch.tensor(losses, dtype=torch.float64)
            if config.calculate_per_token_loss:
                sums_counts = sums_counts.sum(0, keepdim=True)
                dist.all_reduce(sums_counts, group=ranks.get_data_parallel_group())
            series["losses"].append((sums_counts[:, 0] / sums_counts[:, 1]).mean().item())
    series["initial"] = initial
    series["weights"] = {
        name: getattr(weight, "main_param", weight).detach().clone()
        for name, weight in model.named_parameters()
    }
    return series


def _forward(data: Iterator[Mapping[str, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """A micro-batch through the model, and what makes the loss of what comes out."""
    batch = next(data)
    target = batch["target"]
    labels = target.masked_fill(target == IGNORED, 0)
    out = model(batch["token"], batch["place"], batch["hidden"], labels=labels)
    return out, partial(_loss, target != IGNORED)


def _loss(counts: Tensor, of_tokens: Tensor) -> tuple[Tensor, Tensor, tuple[float, int]]:
    loss = (of_tokens.float() * counts).sum()
    return loss.clone(), counts.sum().int(), (loss.item(), int(counts.sum()))


def _losses(logits_TV: Tensor, target_T: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cross-entropy of each token, and the gradient of its sum, as their two kernels have them here."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    models.begin(tp=2)
    fused = partial(fused_vocab_parallel_cross_entropy, tp_group=dist.group.WORLD)
    losses = []
    for kernel in (vocab_parallel_cross_entropy, fused):
        own_logits = logits_TV.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
        loss_T = kernel((own_logits * 1)[:, None], target_T[:, None])[:, 0]
        loss_T.sum().backward()
        losses.append((loss_T.detach(), own_logits.grad))
    return losses


def _assigned_layers(
    layers: int, pp: int, vp: int, first: int | None, last: int | None, embedding: bool, head: bool
) -> list[tuple[int, int]] | None:
    """First layer and number of layers of every stage, in the order of the stages; None if they refuse."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp if vp > 1 else None, pipeline_dtype=torch.float32,
            num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=embedding, account_for_loss_in_pipeline_split=head,
        )  # fmt: skip
        stages = [(chunk if vp > 1 else None, rank) for chunk in range(vp) for rank in range(pp)]
        return [
            (get_transformer_layer_offset(config, *stage), get_num_layers_to_build(config, *stage))
            for stage in stages
        ]
    except (ArithmeticError, AssertionError, ValueError):  # no middle stage is a division by zero there
        return None


def _without_states() -> None:
    """Let recomputation, which keeps the random numbers of a GPU, keep those of the CPU."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _norms_of_own_tokens() -> None:
    """Let torch's norms, which refuse it, norm each rank's own tokens, and say so as Apex's do."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def build_norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = build_norm
