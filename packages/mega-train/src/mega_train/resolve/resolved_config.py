"""The resolved configuration of a run, with all derived values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.fp8_recipe import Fp8Recipe
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import ModelSpec
from mega_train.config import RunConfig
from mega_train.data.prefix_reader import PrefixRule
from mega_train.data.span_corruption import SpanLengths, SpanRule
from mega_train.data.splits_config import DataSplitsConfig
from mega_train.distributed.bucket_layout import DEFAULT_BUCKET_ELEMENTS, ShardingConfig
from mega_train.resolve.checks import zero_stage
from mega_train.resolve.run_mode import is_eval_only
from mega_train.schedules.batch_size import BatchSizeRampup
from mega_train.schedules.lr import LRSchedule, ParamSchedules
from mega_train.schedules.seq_length import SeqLengthSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The resolved configuration of a run.

    Attributes:
        seq_length: tokens of a sample; of T5, of its encoder.
        seq_length_schedule: tokens of a sample that a step reads.
        micro_batch_size: samples in one forward pass of one rank.
        batch_size_schedule: samples of a step.
        iterations: optimizer steps.
        skipped_iterations: steps whose samples are skipped, as ascending ranges.
        eod: the end-of-document token, if the run needs it.
        recompute: recomputation policy.
        fp8: FP8 recipe; None without FP8.
    """

    run: RunConfig
    spec: ModelSpec
    layout: Layout
    seq_length: int
    seq_length_schedule: SeqLengthSchedule
    micro_batch_size: int
    batch_size_schedule: BatchSizeRampup
    iterations: int
    skipped_iterations: tuple[range, ...]
    schedules: ParamSchedules
    eod: int | None
    recompute: RecomputePolicy
    fp8: Fp8Recipe | None
    device: Literal["cpu", "cuda"]

    @property
    def global_batch_size(self) -> int:
        """Samples of a step of full size, and of a batch of a validation."""
        return self.batch_size_schedule.size_at(self.batch_size_schedule.ramp + 1)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one rank in a step of full size."""
        return self.num_micro_batches(self.global_batch_size)

    @property
    def is_eval_only(self) -> bool:
        return is_eval_only(self.run)

    def num_micro_batches(self, samples: int) -> int:
        """Return the micro-batches of one rank for `samples` samples over all ranks."""
        return samples // (self.micro_batch_size * self.layout.dp)

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Terms of the loss by Megatron's names; empty if it has one."""
        return ("lm loss", "sop loss") if self.spec.binary_head else ()

    @property
    def lr_schedule(self) -> LRSchedule:
        return self.schedules.lr

    @property
    def sharding_config(self) -> ShardingConfig:
        """The sharding of the model's state over the replicas."""
        parallel = self.run.parallel
        replicas = self.layout.dp * self.layout.cp
        return ShardingConfig(
            stage=zero_stage(parallel),
            bucket_elements=parallel.bucket or max(DEFAULT_BUCKET_ELEMENTS, 1_000_000 * replicas),
            overlap_reduce=parallel.overlap_reduce,
            overlap_gather=parallel.overlap_gather,
            reduce_bf16=parallel.reduce_bf16,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of full size over all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def train_samples(self) -> int:
        """Samples of the whole run."""
        samples = self.run.train.samples
        return self.iterations * self.global_batch_size if samples is None else samples

    @property
    def valid_samples(self) -> int:
        """Samples of all validations of the run, as Megatron counts them."""
        evaluation = self.run.evaluation
        return (self.iterations // evaluation.interval + 1) * evaluation.iterations * self.global_batch_size

    @property
    def test_samples(self) -> int:
        return self.run.evaluation.iterations * self.global_batch_size

    def data_splits_config(self, *, iteration: int, consumed_samples: int) -> DataSplitsConfig:
        """Return the options of the data splits, for a run with this progress."""
        # more than the samples of --train-iters if a run resumes with smaller batches
        end = self.batch_size_schedule.samples_after(consumed_samples, max(0, self.iterations - iteration))
        return DataSplitsConfig(
            options=self.run.data,
            seq_length=self.seq_length if self.span_rule is None else self.span_rule.lengths.tokens - 1,
            seed=self.run.train.seed,
            train_samples=max(self.train_samples, end),
            valid_samples=self.valid_samples,
            test_samples=self.test_samples,
            prefix_rule=self._prefix_rule(),
            span_rule=self.span_rule,
            save=self.run.checkpoint.save,
        )

    @property
    def span_rule(self) -> SpanRule | None:
        """The rule of span corruption; None without it."""
        objective = self.run.objective
        if objective.noise_density is None:
            return None
        lengths = SpanLengths.fit(self.seq_length, objective.noise_density, objective.mean_span_length)
        return SpanRule(self.seq_length, lengths, self.run.train.seed, objective.prefix)

    def _prefix_rule(self) -> PrefixRule | None:
        data = self.run.data
        if not self.run.objective.prefix or self.span_rule is not None:
            return None
        return PrefixRule(
            self.run.train.seed,
            self.eod,
            per_document=data.reset_attention,
            resets_positions=data.reset_positions and self.spec.positions != "rope",
            masks_eod=data.eod_mask_loss,
            targets_only=self.run.objective.targets_only,
        )
