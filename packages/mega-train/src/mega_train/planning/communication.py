"""Bytes that one rank sends in one step, by axis."""

from __future__ import annotations

from dataclasses import dataclass

from mega_train.planning.roofline import collective_bytes, kv_gather_bytes, tp_collectives
from mega_train.planning.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CommVolume:
    """Bytes that the busiest rank sends in one optimizer step, by axis."""

    tp: float
    cp: float
    pp: float
    dp: float


def comm_volume(workload: Workload) -> CommVolume:
    collectives = tp_collectives(workload)
    tp = cp = pp = 0.0
    for pp_rank in workload.model.distinct_ranks:
        stages, layers = workload.model.stages[pp_rank], workload.model.layers_per_rank[pp_rank]
        recomputed = workload.recomputed_layers(stages)
        fully_recomputed = recomputed if workload.recompute.granularity == "full" else 0
        passes = (layers + fully_recomputed) * collectives.layer + layers * collectives.layer_back
        passes += stages[0].is_first * (collectives.embedding + collectives.embedding_back)
        passes += stages[-1].is_last * (collectives.head + collectives.head_back)
        tp = max(tp, workload.num_micro_batches * passes * collective_bytes(workload))
        cp = max(cp, workload.num_micro_batches * (2 * layers + recomputed) * kv_gather_bytes(workload))
        sends = sum((not stage.is_last) + (not stage.is_first) for stage in stages)
        tied = tied_gradient_bytes(workload) if stages[0].is_first or stages[-1].is_last else 0.0
        pp = max(pp, workload.num_micro_batches * sends * p2p_bytes(workload) + tied)
    return CommVolume(tp=tp, cp=cp, pp=pp, dp=sum(data_parallel_bytes(workload)))


def tied_gradient_bytes(workload: Workload) -> float:
    """Return the bytes of a tied embedding's gradient, which the first and the last stage exchange."""
    if workload.layout.pp == 1:
        return 0.0
    return (
        workload.model.shares.tied * workload.precision.gradient / (workload.replicas if workload.zero else 1)
    )


def p2p_bytes(workload: Workload) -> float:
    """Return the bytes of one micro-batch from a rank of one stage to a rank of the next."""
    activation_bytes = workload.outer_tokens * workload.spec.hidden * workload.precision.weight
    return (
        activation_bytes / workload.layout.tp
        if workload.implementation.sliced_p2p and not workload.sequence
        else activation_bytes
    )


def data_parallel_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes that the fullest rank sends to reduce gradients, and to gather gradients or weights.

    Without ZeRO an all-reduce, which is a reduce-scatter and a gather of gradients; with it the gather is of
    weights. Stage 2 reduces after every micro-batch; stage 3 does too, and gathers for every micro-batch's
    forward pass and once more for its backward pass (arXiv:1910.02054 §7).
    """
    d = workload.replicas
    precision = workload.precision
    elements = max(workload.model.elements)
    ring = (d - 1) / d * elements
    if workload.zero == 3:
        return (
            workload.num_micro_batches * ring * precision.gradient,
            workload.num_micro_batches * 2 * ring * precision.weight,
        )
    gathered = precision.weight if workload.zero else precision.gradient
    return workload.reductions * ring * precision.gradient, ring * gathered
