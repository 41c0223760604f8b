"""Floating-point operations of one optimizer step, all ranks together.

Every matrix of the table is used once per token: 2 operations per element forward, 4 backward. With the
4·s·q of attention per token and layer forward and 8 backward, nothing left out as masked, this is, for GPT
with f = 4h, the 72·B·s·L·h²·(1 + s/6h + V/12hL) of arXiv:2205.05198 eq. 7 and what Megatron core reports.
"""

from __future__ import annotations

from mega_schema.arch import table
from mega_schema.params import count_params
from mega_schema.spec import ModelSpec
from mega_train.planning.workload import Job


def parameters(spec: ModelSpec) -> int:
    """Of the whole model, a tied one counted once, padding not counted."""
    return count_params(table(spec))


def model_flops(job: Job) -> float:
    """What the model needs, however it is computed: the numerator of MFU."""
    return job.global_samples * job.length * per_token(job.spec, job.length)


def per_token(spec: ModelSpec, length: int) -> float:
    """The same for one token of a sequence of `length`."""
    return 6.0 * (_layers(spec) + _head(spec)) + 3.0 * _attention(spec, length)


def hardware_flops(job: Job) -> float:
    """With what recomputation repeats: the numerator of HFU."""
    m, forward = job.spec, _attention(job.spec, job.length)
    if job.recompute.granularity == "full":
        forward += 2.0 * _layers(m)
    again = sum(job.again(stages) for stages in job.cut.stages) / m.layers
    return model_flops(job) + job.global_samples * job.length * again * forward


def _layers(spec: ModelSpec) -> int:
    """Elements of the layers' matrices."""
    return sum(row.size for row in table(spec) if isinstance(row.stage, int) and len(row.shape) == 2)


def _head(spec: ModelSpec) -> int:
    return spec.vocab * spec.hidden


def _attention(spec: ModelSpec, length: int) -> float:
    """Per token, forward."""
    return 4.0 * length * spec.q_rows * spec.layers
