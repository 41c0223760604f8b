"""A run that can begin: everything derived from what a person said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.fp8_recipe import Fp8Recipe
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import ModelSpec
from mega_train.config import Run
from mega_train.distributed.bucket_layout import Sharing
from mega_train.resolve.checks import zero_stage
from mega_train.resolve.run_mode import only_validates
from mega_train.schedules.batch_size import BatchSizes
from mega_train.schedules.lr import Courses, LearningRate
from mega_train.schedules.seq_length import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can begin.

    Attributes:
        length: tokens of a sample.
        lengths: how many of them a step reads.
        micro: samples in one forward pass of one rank.
        batches: how many samples a step has.
        iterations: optimizer steps in all.
        passed_over: steps whose samples are left out, in ranges one after another.
        eod: the token that ends a document, where the run needs to know it.
        recompute: what backward computes again.
        fp8: how the layers' products are made in FP8; None where they are not.
    """

    run: Run
    spec: ModelSpec
    layout: Layout
    length: int
    lengths: Lengths
    micro: int
    batches: BatchSizes
    iterations: int
    passed_over: tuple[range, ...]
    courses: Courses
    eod: int | None
    recompute: RecomputePolicy
    fp8: Fp8Recipe | None
    device: Literal["cpu", "cuda"]

    @property
    def global_samples(self) -> int:
        """Samples of a step of full size, and of a batch of a validation."""
        return self.batches.at(self.batches.ramp + 1)

    @property
    def accumulation(self) -> int:
        """Forward passes of one rank in a step of full size."""
        return self.micros(self.global_samples)

    @property
    def only_validates(self) -> bool:
        return only_validates(self.run)

    def micros(self, samples: int) -> int:
        """Forward passes of one rank for so many samples of all ranks together."""
        return samples // (self.micro * self.layout.dp)

    @property
    def rate(self) -> LearningRate:
        return self.courses.rate

    @property
    def sharing(self) -> Sharing:
        """How the replicas of the model share the work of keeping it."""
        p, replicas = self.run.parallel, self.layout.dp * self.layout.cp
        return Sharing(
            stage=zero_stage(p),
            bucket=p.bucket or max(40_000_000, 1_000_000 * replicas),  # Megatron's
            overlap_reduce=p.overlap_reduce,
            overlap_gather=p.overlap_gather,
            reduce_bf16=p.reduce_bf16,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of full size, all ranks together."""
        return self.global_samples * self.length

    @property
    def train_samples(self) -> int:
        """Samples of the whole run."""
        said = self.run.train.samples
        return self.iterations * self.global_samples if said is None else said

    @property
    def valid_samples(self) -> int:
        """Samples of all validations of the run together, as Megatron counts them."""
        evaluation = self.run.evaluation
        return (self.iterations // evaluation.interval + 1) * evaluation.iterations * self.global_samples

    @property
    def test_samples(self) -> int:
        return self.run.evaluation.iterations * self.global_samples
