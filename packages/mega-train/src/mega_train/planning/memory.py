"""Bytes on every rank, by kind."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mega_train.planning.activations import (
    embedding_bytes,
    layer_bytes,
    loss_bytes,
    working_bytes,
)
from mega_train.planning.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the ranks of one place of the pipeline, at the moment that most is held.

    Attributes:
        activations: kept for the backward pass of every micro-batch in flight.
        logits: of the one micro-batch whose loss is being computed, with the loss's own.
        buffers: gradients of activations on their way through a layer, and what is recomputed for them.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


def memory(job: Job, place: int) -> Memory:
    """Of the ranks at `place` of pp; they all hold the same."""
    stages, held = job.cut.stages[place], job.cut.held[place]
    precision, share = job.precision, math.ceil(held / job.replicas)
    flying = in_flight(job, place)
    kept = sum(
        flying[i] * (len(stage.layers) * layer_bytes(job) + (embedding_bytes(job) if stage.first else 0))
        for i, stage in enumerate(stages)
    )
    return Memory(
        weights=(share if job.zero > 2 else held) * precision.weight,
        gradients=(share if job.zero > 1 else held) * precision.gradient,
        optimizer=(share if job.zero > 0 else held) * precision.state,
        activations=round(kept),
        logits=round(loss_bytes(job)) if stages[-1].last else 0,
        buffers=round(working_bytes(job, last=stages[-1].last)),
    )


def fullest(job: Job) -> Memory:
    """Of the place of pp that holds most."""
    return max((memory(job, place) for place in job.cut.kinds), key=lambda held: held.total)


def in_flight(job: Job, place: int) -> tuple[int, ...]:
    """Micro-batches whose activations each chunk of this place holds when most are held.

    GPipe (arXiv:1811.06965) holds all. 1F1B holds as many as there are stages from here to the last.
    Interleaved, a rank goes forward through its chunks in groups of pp micro-batches, 2·(pp - place - 1) +
    (vp - 1)·pp times before it first goes back, and once more (arXiv:2104.04473 §2.2).
    """
    pp, vp = job.layout.pp, job.layout.vp
    if job.schedule == "gpipe":
        return (job.micros,) * vp
    if vp == 1:
        return (min(job.micros, pp - place),)
    begun = min(2 * (pp - place - 1) + (vp - 1) * pp + 1, job.micros * vp)
    chunks = Counter(number // pp % vp for number in range(begun))
    return tuple(chunks[chunk] for chunk in range(vp))
