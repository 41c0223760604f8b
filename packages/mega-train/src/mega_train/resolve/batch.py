"""Resolve and check sample length, batch size, duration and intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mega_schema.errors import ConfigError, LayoutError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_train.config import CurriculumConfig, RunConfig, TrainConfig
from mega_train.resolve.required import require_positive
from mega_train.schedules.batch_size import BatchSizeRampup
from mega_train.schedules.seq_length import SeqLengthSchedule


def check_length(run: RunConfig, spec: ModelSpec, length: int, layout: Layout) -> Iterator[MegaError]:
    """Check that a sample fits the model and divides over the ranks.

    Yields:
        an error if the sample does not fit the model, or does not divide over the ranks.
    """
    if length < 1 or length > spec.max_seq_len:
        yield ConfigError(
            "--seq-length",
            "does not fit the model",
            found=f"{length} tokens",
            wanted=f"1 to {spec.max_seq_len} (--max-position-embeddings)",
        )
        return
    if layout.cp > 1 and length % (chunks := 2 * layout.cp):
        near = max(chunks, length // chunks * chunks)
        yield LayoutError(
            "--context-parallel-size",
            "a sequence cannot be split into two chunks for each rank",
            found=f"{length} tokens, cp={layout.cp}",
            wanted=f"a sequence length that is a multiple of 2 x {layout.cp} = {chunks}",
            hint=f"--seq-length {near}",
        )
    tp = layout.tp
    tokens = run.batch.micro * length // layout.cp
    if run.parallel.sequence and tokens % tp:
        yield LayoutError(
            "--sequence-parallel",
            "the tokens of a micro-batch cannot be split evenly",
            found=f"{tokens} tokens over tp={tp}",
            wanted="micro-batch size x sequence length"
            + (f" / {layout.cp}" if layout.cp > 1 else "")
            + f" a multiple of {tp}",
        )


def seq_length_schedule(run: RunConfig, length: int, layout: Layout) -> SeqLengthSchedule:
    """Build the schedule of the sample length up to `length`.

    Raises:
        ConfigError: the curriculum's flags are wrong, or a length does not divide over the ranks.
    """
    config = run.curriculum
    if config == CurriculumConfig():
        return SeqLengthSchedule(length)
    if run.data.sft:
        raise ConfigError(
            "--curriculum-start-length", "would cut answers off", found="--sft", hint="leave it out"
        )
    start = require_positive(
        config.start, "--curriculum-start-length", "tokens", "--curriculum-start-length 64"
    )
    steps = require_positive(config.steps, "--curriculum-steps", "optimizer steps", "--curriculum-steps 1000")
    if start >= length:
        below = f"fewer than --seq-length, {length}"
        raise ConfigError("--curriculum-start-length", "leaves nothing to grow", found=start, wanted=below)
    multiple = require_positive(
        config.multiple, "--curriculum-length-multiple", "tokens", "--curriculum-length-multiple 8"
    )
    root = require_positive(config.root, "--curriculum-root", "a root", "--curriculum-root 2")
    schedule = SeqLengthSchedule(length, start, steps, multiple, root)
    shared = 2 * layout.cp if layout.cp > 1 else 1
    tokens = layout.tp if run.parallel.sequence or run.recompute.distribute_saved else 1
    for tokens_of_sample in schedule.all_lengths:
        if tokens_of_sample % shared or run.batch.micro * tokens_of_sample // layout.cp % tokens:
            divisor = shared * tokens
            raise ConfigError(
                "--curriculum-length-multiple",
                "some lengths cannot be split over the ranks",
                found=f"{tokens_of_sample} tokens of {start}, and so on by {multiple}",
                wanted=f"lengths for cp={layout.cp} and tp={layout.tp}",
                hint=f"a --curriculum-start-length and a --curriculum-length-multiple that {divisor} divides",
            )
    return schedule


def batch_sizes(run: RunConfig, dp: int) -> tuple[int, int]:
    """Return the samples of a micro-batch and of an optimizer step.

    Raises:
        ConfigError: the batch size is not a multiple of the micro-batch size times the replicas.
    """
    micro_batch_size = run.batch.micro
    if micro_batch_size < 1:
        raise ConfigError("--micro-batch-size", "not a size", found=micro_batch_size, wanted="1 or more")
    global_batch_size = _global_batch_size(run, micro_batch_size * dp)
    smallest = micro_batch_size * dp if run.batch.decrease else 1
    if global_batch_size < smallest or (
        global_batch_size % (micro_batch_size * dp) and not run.batch.decrease
    ):
        near = max(1, round(global_batch_size / (micro_batch_size * dp))) * micro_batch_size * dp
        raise ConfigError(
            "--global-batch-size",
            "is not a multiple of micro-batch size x data-parallel size",
            found=global_batch_size,
            wanted=f"a multiple of {micro_batch_size} x {dp} = {micro_batch_size * dp}",
            hint=f"--global-batch-size {near}",
        )
    return micro_batch_size, global_batch_size


def _global_batch_size(run: RunConfig, samples_per_micro_step: int) -> int:
    """Return the samples of a step."""
    global_samples, accumulation = run.batch.global_samples, run.batch.accumulation
    if accumulation is None:
        return samples_per_micro_step if global_samples is None else global_samples
    if accumulation < 1:
        raise ConfigError("--update-freq", "not a count", found=accumulation, wanted="1 or more")
    if global_samples not in (None, accumulation * samples_per_micro_step):
        raise ConfigError(
            "--update-freq",
            "disagrees with --global-batch-size",
            found=f"{accumulation} micro-batches of {samples_per_micro_step} samples",
            wanted=f"{global_samples} samples",
            hint="leave one of them out",
        )
    return accumulation * samples_per_micro_step


def batch_size_schedule(
    run: RunConfig, global_batch_size: int, samples_per_micro_step: int
) -> BatchSizeRampup:
    """Build the schedule of the batch size up to `global_batch_size`.

    Args:
        samples_per_micro_step: samples of one micro-batch of every replica.

    Raises:
        ConfigError: the flags of the ramp-up are wrong, or a size does not divide over the replicas.
    """
    multiple = samples_per_micro_step if run.batch.decrease else 1
    if run.batch.rampup is None:
        return BatchSizeRampup(global_batch_size, multiple=multiple)
    flag = "--rampup-batch-size"
    start, increment, ramp = run.batch.rampup
    text = f"{start} {increment} {ramp}"
    if run.train.samples is None:
        wanted = "--train-samples, as a step has no one size"
        raise ConfigError(flag, "needs a run counted in samples", found="--train-iters", wanted=wanted)
    if (
        start < 1
        or increment < 1
        or ramp < 1
        or start >= global_batch_size
        or (global_batch_size - start) % increment
    ):
        raise ConfigError(
            flag,
            "does not end at --global-batch-size",
            found=text,
            wanted=f"START + a whole number of INCREMENTs = {global_batch_size}, each above 0, "
            "over 1 or more samples",
        )
    sizes = BatchSizeRampup(global_batch_size, start, increment, ramp, multiple)
    for size in sizes.sizes:
        if size < samples_per_micro_step or (size % samples_per_micro_step and not run.batch.decrease):
            raise ConfigError(
                flag,
                "has a size that is not a multiple of micro-batch size x data-parallel size",
                found=f"{size} of {text}",
                wanted=f"multiples of {samples_per_micro_step}",
                hint="--decrease-batch-size-if-needed rounds down" if size >= samples_per_micro_step else "",
            )
    return sizes


def check_duration(train: TrainConfig) -> Iterator[MegaError]:
    """Check that exactly one of --train-iters and --train-samples is given.

    Yields:
        an error if neither or both are given, or a value is out of range.
    """
    iterations, samples = train.iterations, train.samples
    if samples is None:
        require_positive(iterations, "--train-iters", "optimizer steps", "--train-iters 1000")
    elif iterations is None:
        require_positive(samples, "--train-samples", "samples", "--train-samples 100000")
    else:
        found = f"{iterations} and {samples}"
        yield ConfigError("--train-samples", "excludes --train-iters", found=found, wanted="one of them")


def num_iterations(train: TrainConfig, batch_size_schedule: BatchSizeRampup) -> int:
    """Return the optimizer steps of a run that `check_duration` accepts.

    Raises:
        ConfigError: the samples do not fill a step.
    """
    iterations, samples = train.iterations, train.samples
    if samples is None:
        assert iterations is not None
        return iterations
    steps = batch_size_schedule.steps(samples)
    if steps < 1:
        minimum = f"{batch_size_schedule.size_at(0)} or more, a step's"
        raise ConfigError("--train-samples", "not enough for a step", found=samples, wanted=minimum)
    return steps


def skipped_iterations(run: RunConfig) -> tuple[range, ...]:
    """Parse --skip-train-iteration-range into ascending ranges without overlap.

    Raises:
        ConfigError: a value is not a range of steps.
    """
    flag = "--skip-train-iteration-range"
    steps = set[int]()
    for text in run.train.skipped_iterations:
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ConfigError(
                flag, "is not a range of steps", found=text, wanted="FIRST-LAST, such as 100-120"
            )
        steps.update(range(int(first), int(last) + 1))
    firsts = [step for step in sorted(steps) if step - 1 not in steps]
    lasts = [step for step in sorted(steps) if step + 1 not in steps]
    return tuple(range(first, last + 1) for first, last in zip(firsts, lasts, strict=True))


def as_eval_run(run: RunConfig) -> RunConfig:
    """Fill in the training values that a validation-only run does not need.

    Raises:
        ConfigError: the run has no validation.
    """
    if run.evaluation.iterations == 0:
        hint = "--eval-iters 100"
        raise ConfigError(
            "--skip-train", "no validation and no training are requested", found="--eval-iters 0", hint=hint
        )
    train, optimizer = run.train, run.optimizer
    if train.iterations is None and train.samples is None:
        train = replace(train, iterations=1)
    return replace(run, train=train, optimizer=replace(optimizer, lr=optimizer.lr or 1.0))


def check_counts(run: RunConfig) -> Iterator[MegaError]:
    """Check intervals, counts and the seed.

    Yields:
        an error if a value is out of range.
    """
    counts = {
        "--eval-interval": run.evaluation.interval,
        "--log-interval": run.log.interval,
        "--exit-interval": run.train.exit_interval,
        "--tensorboard-log-interval": run.log.tensorboard_interval,
    }
    for flag, value in counts.items():
        if value is not None and value < 1:
            yield ConfigError(flag, "not an interval", found=value, wanted="1 or more")
    times = {
        "--distributed-timeout-minutes": run.parallel.timeout_minutes,
        "--exit-duration-in-mins": run.train.exit_minutes,
    }
    for flag, minutes in times.items():
        if minutes is not None and not 0 < minutes < math.inf:
            yield ConfigError(flag, "not a time", found=minutes, wanted="more than 0")
    if not 0 <= run.train.seed < 1 << 32:
        yield ConfigError("--seed", "is not a seed of numpy", found=run.train.seed, wanted="0 to 2^32 - 1")
    if run.evaluation.iterations < 0:
        yield ConfigError("--eval-iters", "not a count", found=run.evaluation.iterations, wanted="0 or more")
