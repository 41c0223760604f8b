"""Floating-point operations of one optimizer step over all ranks.

Every matrix of the table is used once per token: 2 operations per element forward, 4 backward. With
attention's 4·s·q per token and layer forward and 8·s·q backward, without skipping masked scores, this is for
GPT with f = 4h the 72·B·s·L·h²·(1 + s/6h + V/12hL) of arXiv:2205.05198 eq. 7 and what Megatron core reports.
"""

from __future__ import annotations

from mega_schema.arch import table
from mega_schema.params import count_params
from mega_schema.spec import ModelSpec
from mega_train.planning.workload import Workload


def parameters(spec: ModelSpec) -> int:
    """Count the parameters of the model, tied ones once, without padding."""
    return count_params(table(spec))


def model_flops(workload: Workload) -> float:
    """Return the FLOPs of the model without recomputation: the numerator of MFU."""
    return (
        workload.global_batch_size * workload.seq_length * flops_per_token(workload.spec, workload.seq_length)
    )


def flops_per_token(spec: ModelSpec, length: int) -> float:
    """Return the FLOPs per token of a sequence of `length`."""
    return 6.0 * (_layer_elements(spec) + _head_elements(spec)) + 3.0 * _attention_flops(spec, length)


def hardware_flops(workload: Workload) -> float:
    """Return the FLOPs including recomputation: the numerator of HFU."""
    spec = workload.spec
    forward = _attention_flops(workload.spec, workload.seq_length)
    if workload.recompute.granularity == "full":
        forward += 2.0 * _layer_elements(spec)
    recomputed = sum(workload.recomputed_layers(stages) for stages in workload.model.stages) / spec.layers
    return model_flops(workload) + workload.global_batch_size * workload.seq_length * recomputed * forward


def _layer_elements(spec: ModelSpec) -> int:
    """Count the elements of the layers' matrices."""
    return sum(row.size for row in table(spec) if isinstance(row.stage, int) and len(row.shape) == 2)


def _head_elements(spec: ModelSpec) -> int:
    return spec.vocab * spec.hidden


def _attention_flops(spec: ModelSpec, length: int) -> float:
    """Return the forward FLOPs of attention per token."""
    return 4.0 * length * spec.q_rows * spec.layers
