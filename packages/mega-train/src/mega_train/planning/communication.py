"""Bytes that one rank sends in one step, by axis."""

from __future__ import annotations

from dataclasses import dataclass

from mega_train.planning.roofline import half_bytes, key_bytes, transfers
from mega_train.planning.workload import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that the rank with most to send sends in one optimizer step, by axis."""

    tp: float
    cp: float
    pp: float
    dp: float


def traffic(job: Job) -> Traffic:
    halves = transfers(job)
    tp = cp = pp = 0.0
    for place in job.cut.kinds:
        stages, layers = job.cut.stages[place], job.cut.depth[place]
        again = job.again(stages)
        whole = again if job.recompute.granularity == "full" else 0
        passes = (layers + whole) * halves.layer + layers * halves.layer_back
        passes += stages[0].is_first * (halves.embedding + halves.embedding_back)
        passes += stages[-1].is_last * (halves.head + halves.head_back)
        tp = max(tp, job.micros * passes * half_bytes(job))
        cp = max(cp, job.micros * (2 * layers + again) * key_bytes(job))
        sends = sum((not stage.is_last) + (not stage.is_first) for stage in stages)
        tied = tie_bytes(job) if stages[0].is_first or stages[-1].is_last else 0.0
        pp = max(pp, job.micros * sends * stage_bytes(job) + tied)
    return Traffic(tp=tp, cp=cp, pp=pp, dp=sum(data_parallel_bytes(job)))


def tie_bytes(job: Job) -> float:
    """Of the gradient of an embedding that scores too, which the first stage and the last add up."""
    if job.layout.pp == 1:
        return 0.0
    return job.cut.shares.tied * job.precision.gradient / (job.replicas if job.zero else 1)


def stage_bytes(job: Job) -> float:
    """Bytes of one micro-batch that cross from a stage to the next, from one rank to one rank."""
    whole = job.outer_tokens * job.spec.hidden * job.precision.weight
    return whole / job.layout.tp if job.software.sliced_p2p and not job.sequence else whole


def data_parallel_bytes(job: Job) -> tuple[float, float]:
    """Bytes that the fullest rank sends to reduce gradients, and to gather what the reduction left apart.

    Without ZeRO an all-reduce, which is a reduce-scatter and a gather of gradients; with it the gather is of
    weights. Stage 2 reduces after every micro-batch; stage 3 does too, and gathers for every micro-batch's
    forward pass and once more for its backward pass (arXiv:1910.02054 §7).
    """
    d, precision = job.replicas, job.precision
    held = max(job.cut.held)
    ring = (d - 1) / d * held
    if job.zero == 3:
        return job.micros * ring * precision.gradient, job.micros * 2 * ring * precision.weight
    gathered = precision.weight if job.zero else precision.gradient
    return job.reductions * ring * precision.gradient, ring * gathered
