"""Estimate the memory of every rank, by kind."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from mega_train.planning.activations import embedding_bytes, layers_bytes, loss_bytes, working_bytes
from mega_train.planning.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes of the ranks at one pipeline rank.

    Attributes:
        activations: kept for the backward pass of every micro-batch in flight.
        loss: of the micro-batch whose loss is being computed: last norm, and gradients of the head.
        buffers: one layer's activation gradients, and recomputed activations.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss + self.buffers


def rank_memory(workload: Workload, pp_rank: int) -> RankMemory:
    """Estimate the memory at pipeline rank `pp_rank`."""
    stages, elements = workload.model.stages[pp_rank], workload.model.elements[pp_rank]
    weights, gradients, state = workload.precision.bytes_per_param(workload.zero, workload.replicas)
    stage_micro_batches = micro_batches_in_flight(workload, pp_rank)
    activations = sum(
        stage_micro_batches[i]
        * (layers_bytes(workload, stage) + (embedding_bytes(workload) if stage.is_first else 0))
        for i, stage in enumerate(stages)
    )
    return RankMemory(
        weights=math.ceil(elements * weights),
        gradients=math.ceil(elements * gradients + _unreduced_bytes(workload, pp_rank)),
        optimizer=math.ceil(elements * state),
        activations=round(activations),
        loss=round(loss_bytes(workload)) if stages[-1].is_last else 0,
        buffers=round(working_bytes(workload, last=stages[-1].is_last) + _gathered_bytes(workload, pp_rank)),
    )


def _gathered_bytes(workload: Workload, pp_rank: int) -> float:
    """Return the bytes that ZeRO gathers temporarily.

    Stage 2 gathers the gradients of a bucket, unless `_unreduced_bytes` counts them; stage 3 the weights of a
    block, of the next one and of the ends, and a block's gradients (arXiv:1910.02054 §7).
    """
    if workload.zero < 2 or workload.replicas == 1 or _reduces_by_round(workload):
        return 0
    precision = workload.precision
    elements = workload.model.elements[pp_rank]
    layer = workload.model.shares.layers[0]
    if workload.zero == 2:
        buckets = 2 if workload.implementation.overlaps_reduce else 1
        return min(elements, buckets * workload.bucket_elements) * precision.gradient
    ends = elements - layer * workload.model.layers_per_rank[pp_rank]
    return (ends + 2 * layer) * precision.weight + layer * (precision.weight + 4)


def _unreduced_bytes(workload: Workload, pp_rank: int) -> float:
    """Return the bytes of the gradients that stage 2 accumulates over a round of micro-batches.

    They belong to one virtual stage, and to a second one while the first is being reduced.
    """
    if not _reduces_by_round(workload):
        return 0
    return min(1.0, 2 / workload.layout.vp) * workload.model.elements[pp_rank] * workload.precision.gradient


def _reduces_by_round(workload: Workload) -> bool:
    return workload.zero == 2 and workload.reductions < workload.num_micro_batches


def peak_rank(workload: Workload) -> RankMemory:
    """Return the memory of the pipeline rank with the highest use."""
    return max(
        (rank_memory(workload, pp_rank) for pp_rank in workload.model.distinct_ranks),
        key=lambda rank: rank.total,
    )


def micro_batches_in_flight(workload: Workload, pp_rank: int) -> tuple[int, ...]:
    """Count the micro-batches whose activations each stage of this pipeline rank holds at its peak.

    GPipe (arXiv:1811.06965) holds all. 1F1B holds as many as there are stages from this one to the last.
    Interleaved, a rank goes forward through its stages in rounds of pp micro-batches, or a few more where pp
    does not divide them, until the first backward pass reaches it (arXiv:2104.04473 §2.2). Zero-bubble defers
    the weight gradients of one pass for every earlier pipeline rank (arXiv:2401.10241 §2).
    """
    pp = workload.layout.pp
    vp = workload.layout.vp
    micros = workload.num_micro_batches
    if workload.schedule == "gpipe":
        return (micros,) * vp
    rounds = max(1, micros // pp)
    longest = math.ceil(micros / rounds)
    stages_after = pp - pp_rank - 1
    started = 1 + (stages_after if vp == 1 else (vp - 1) * longest + 2 * stages_after)
    started += pp_rank if workload.schedule == "zero-bubble" else 0
    if vp == 1:
        return (min(started, micros),)
    lengths = (micros // rounds + (number < micros % rounds) for number in range(rounds))
    order = (chunk for length in lengths for chunk in range(vp) for _ in range(length))
    chunks = Counter(itertools.islice(order, started))
    return tuple(chunks[chunk] for chunk in range(vp))
