"""Bytes on every rank, by kind."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from mega_train.planning.activations import embedding_bytes, layers_bytes, loss_bytes, working_bytes
from mega_train.planning.workload import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the ranks of one place of the pipeline, at the moment that most is held.

    Attributes:
        activations: kept for the backward pass of every micro-batch in flight.
        loss: of the one micro-batch whose loss is being computed: the last norm's, and the head's gradients.
        buffers: gradients of activations on their way through a layer, and what is recomputed for them.
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


def memory(job: Job, place: int) -> Memory:
    """Of the ranks at `place` of pp; they all hold the same."""
    stages, held = job.cut.stages[place], job.cut.held[place]
    weights, gradients, state = job.precision.kept(job.zero, job.replicas)
    flying = in_flight(job, place)
    kept = sum(
        flying[i] * (layers_bytes(job, stage) + (embedding_bytes(job) if stage.is_first else 0))
        for i, stage in enumerate(stages)
    )
    return Memory(
        weights=math.ceil(held * weights),
        gradients=math.ceil(held * gradients + _unreduced(job, place)),
        optimizer=math.ceil(held * state),
        activations=round(kept),
        loss=round(loss_bytes(job)) if stages[-1].is_last else 0,
        buffers=round(working_bytes(job, last=stages[-1].is_last) + _gathered(job, place)),
    )


def _gathered(job: Job, place: int) -> float:
    """What ZeRO makes whole for a while: at stage 2 the gradients of a bucket, unless they wait for their
    round, which `_unreduced` counts; at stage 3 the weights of a block, of the one after it, and of the ends,
    and a block's gradients (arXiv:1910.02054 §7).
    """
    if job.zero < 2 or job.replicas == 1 or _reduces_by_round(job):
        return 0
    precision, held, layer = job.precision, job.cut.held[place], job.cut.shares.layers[0]
    if job.zero == 2:
        buckets = 2 if job.software.overlaps_reduce else 1
        return min(held, buckets * job.bucket) * precision.gradient
    ends = held - layer * job.cut.depth[place]
    return (ends + 2 * layer) * precision.weight + layer * (precision.weight + 4)


def _unreduced(job: Job, place: int) -> float:
    """Bytes of the gradients that stage 2 adds up over a round of micro-batches before it reduces them.

    They are of one virtual stage, and of another while the first is being reduced.
    """
    if not _reduces_by_round(job):
        return 0
    return min(1.0, 2 / job.layout.vp) * job.cut.held[place] * job.precision.gradient


def _reduces_by_round(job: Job) -> bool:
    return job.zero == 2 and job.reductions < job.micros


def fullest(job: Job) -> Memory:
    """Of the place of pp that holds most."""
    return max((memory(job, place) for place in job.cut.kinds), key=lambda held: held.total)


def in_flight(job: Job, place: int) -> tuple[int, ...]:
    """Micro-batches whose activations each stage of this place holds when most are held.

    GPipe (arXiv:1811.06965) holds all. 1F1B holds as many as there are stages from here to the last.
    Interleaved, a rank goes forward through its stages in rounds of pp micro-batches, or a few more where pp
    does not divide them, until the first backward pass reaches it (arXiv:2104.04473 §2.2). Zero-bubble puts
    off the weight gradients of one pass for every place before it (arXiv:2401.10241 §2).
    """
    pp, vp, micros = job.layout.pp, job.layout.vp, job.micros
    if job.schedule == "gpipe":
        return (micros,) * vp
    rounds = max(1, micros // pp)
    longest, after = math.ceil(micros / rounds), pp - place - 1
    begun = 1 + (after if vp == 1 else (vp - 1) * longest + 2 * after)
    begun += place if job.schedule == "zero-bubble" else 0
    if vp == 1:
        return (min(begun, micros),)
    lengths = (micros // rounds + (number < micros % rounds) for number in range(rounds))
    order = (chunk for length in lengths for chunk in range(vp) for _ in range(length))
    chunks = Counter(itertools.islice(order, begun))
    return tuple(chunks[chunk] for chunk in range(vp))
