"""Train a BERT with Megatron Core as `pretrain_bert.py` does, in the processes of `reference_process.run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.megatron_core import models


def train(folder: Path, cases: list[str]) -> None:
    """Train every case of the folder, and write its losses, gradients and weights of this rank beside it."""
    for name in cases:
        case = torch.load(folder / f"{name}.pt", weights_only=False)
        torch.save(_train(case), folder / f"{name}-{dist.get_rank()}.pt")


def _build(case: Mapping[str, Any]) -> Any:
    from megatron.core import parallel_state as ranks
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **case["config"],
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
    )
    model = BertModel(
        config,
        case["token_types"],
        bert_layer_local_spec,
        vocab_size=case["vocab"],
        max_sequence_length=case["length"],
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        add_binary_head=case["binary_head"],
    )
    missing, unexpected = model.load_state_dict(case["weights"][dist.get_rank()], strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    return model.train()


def _train(case: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

    models.begin(case["tp"], case["pp"])
    model = _build(case)
    config = model.config
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(**case["optimizer"]), [ddp])
    scheduler = OptimizerParamScheduler(optimizer, **case["schedule"])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    result: dict[str, Any] = {"losses": [], "norms": []}
    for number, micros in enumerate(case["steps"]):
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
            result["gradients"] = {
                name: weight.main_grad.clone() for name, weight in model.named_parameters()
            }
        _, norm, _ = optimizer.step()
        scheduler.step(increment=rows * len(micros))
        result["norms"].append(norm)
        if losses:  # of the last stage: means over the micro-batches, by term
            terms = torch.tensor(losses, dtype=torch.float64).mean(0)
            result["losses"].append(terms.tolist())
    result["weights"] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return result


def _forward(data: Iterator[Mapping[str, Tensor]], model: Any) -> tuple[Any, Callable[..., Any]]:
    """Compute a micro-batch, and return its output with the function of its loss."""
    batch = next(data)
    is_masked = batch["label"] >= 0
    labels = batch["label"].clamp(min=0)
    out = model(batch["token"], batch["real"], tokentype_ids=batch.get("type"), lm_labels=labels)

    def loss_of(output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, list[float]]:
        losses, binary_logits = output
        terms = [(losses.float() * is_masked).sum() / is_masked.sum()]
        if binary_logits is not None:
            terms.append(F.cross_entropy(binary_logits.float(), batch["order"]))
        return torch.stack(terms).sum(), [float(term) for term in terms]

    return out, loss_of
