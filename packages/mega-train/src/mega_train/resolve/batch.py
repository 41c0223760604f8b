"""Sizes and counts of a run: a sample, a batch, the intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mega_schema.errors import ConfigError, LayoutError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_train.config import Curriculum, Run, Train
from mega_train.resolve.required import wanted
from mega_train.schedules.batch_size import BatchSizes
from mega_train.schedules.seq_length import Lengths


def check_length(run: Run, spec: ModelSpec, length: int, layout: Layout) -> Iterator[MegaError]:
    """A sample that fits the model, and that the ranks can share.

    Yields:
        an error where it does not fit, or they cannot share it.
    """
    if length < 1 or length > spec.context:
        yield ConfigError(
            "--seq-length",
            "does not fit the model",
            found=f"{length} tokens",
            wanted=f"1 to {spec.context} (--max-position-embeddings)",
        )
        return
    if layout.cp > 1 and length % (chunks := 2 * layout.cp):
        near = max(chunks, length // chunks * chunks)
        yield LayoutError(
            "--context-parallel-size",
            "a sequence cannot be cut into two chunks for each rank",
            found=f"{length} tokens, cp={layout.cp}",
            wanted=f"a sequence length that is a multiple of 2 x {layout.cp} = {chunks}",
            hint=f"--seq-length {near}",
        )
    tp, tokens = layout.tp, run.batch.micro * length // layout.cp
    if run.parallel.sequence and tokens % tp:
        yield LayoutError(
            "--sequence-parallel",
            "the tokens of a micro-batch cannot be shared evenly",
            found=f"{tokens} tokens over tp={tp}",
            wanted="micro-batch size x sequence length"
            + (f" / {layout.cp}" if layout.cp > 1 else "")
            + f" a multiple of {tp}",
        )


def length_course(run: Run, length: int, layout: Layout) -> Lengths:
    """How the tokens of a sample grow to `length`.

    Raises:
        ConfigError: the curriculum's flags are none, or the ranks cannot share a length.
    """
    said = run.curriculum
    if said == Curriculum():
        return Lengths(length)
    if run.data.sft:
        raise ConfigError(
            "--curriculum-start-length", "would cut answers off", found="--sft", hint="leave it out"
        )
    start = wanted(said.start, "--curriculum-start-length", "tokens", "--curriculum-start-length 64")
    steps = wanted(said.steps, "--curriculum-steps", "optimizer steps", "--curriculum-steps 1000")
    if start >= length:
        below = f"fewer than --seq-length, {length}"
        raise ConfigError("--curriculum-start-length", "leaves nothing to grow", found=start, wanted=below)
    multiple = wanted(
        said.multiple, "--curriculum-length-multiple", "tokens", "--curriculum-length-multiple 8"
    )
    root = wanted(said.root, "--curriculum-root", "a root", "--curriculum-root 2")
    lengths = Lengths(length, start, steps, multiple, root)
    shared = 2 * layout.cp if layout.cp > 1 else 1
    tokens = layout.tp if run.parallel.sequence or run.recompute.cut else 1
    for each in lengths.all:
        if each % shared or run.batch.micro * each // layout.cp % tokens:
            least = shared * tokens
            raise ConfigError(
                "--curriculum-length-multiple",
                "the ranks cannot share every length",
                found=f"{each} tokens of {start}, and so on by {multiple}",
                wanted=f"lengths for cp={layout.cp} and tp={layout.tp}",
                hint=f"a --curriculum-start-length and a --curriculum-length-multiple that {least} divides",
            )
    return lengths


def batch_sizes(run: Run, dp: int) -> tuple[int, int]:
    """Samples of a micro-batch and of an optimizer step.

    Raises:
        ConfigError: the one does not divide the other over the replicas.
    """
    micro = run.batch.micro
    if micro < 1:
        raise ConfigError("--micro-batch-size", "not a size", found=micro, wanted="1 or more")
    whole = _whole(run, micro * dp)
    least = micro * dp if run.batch.decrease else 1
    if whole < least or (whole % (micro * dp) and not run.batch.decrease):
        near = max(1, round(whole / (micro * dp))) * micro * dp
        raise ConfigError(
            "--global-batch-size",
            "is not a multiple of micro-batch size x data-parallel size",
            found=whole,
            wanted=f"a multiple of {micro} x {dp} = {micro * dp}",
            hint=f"--global-batch-size {near}",
        )
    return micro, whole


def _whole(run: Run, each: int) -> int:
    """Samples of a step, of micro-batches of all replicas of `each` samples together."""
    said, micros = run.batch.global_samples, run.batch.accumulation
    if micros is None:
        return each if said is None else said
    if micros < 1:
        raise ConfigError("--update-freq", "not a count", found=micros, wanted="1 or more")
    if said not in (None, micros * each):
        raise ConfigError(
            "--update-freq",
            "disagrees with --global-batch-size",
            found=f"{micros} micro-batches of {each} samples",
            wanted=f"{said} samples",
            hint="leave one of them out",
        )
    return micros * each


def batch_course(run: Run, whole: int, each: int) -> BatchSizes:
    """How the samples of a step grow to `whole`.

    Args:
        each: samples of one micro-batch of every replica.

    Raises:
        ConfigError: the flags of the ramp-up are none, or a size cannot be shared.
    """
    multiple = each if run.batch.decrease else 1
    if run.batch.rampup is None:
        return BatchSizes(whole, multiple=multiple)
    flag, (start, increment, ramp) = "--rampup-batch-size", run.batch.rampup
    said = f"{start} {increment} {ramp}"
    if run.train.samples is None:
        wanted = "--train-samples, as a step has no one size"
        raise ConfigError(flag, "needs a run counted in samples", found="--train-iters", wanted=wanted)
    if start < 1 or increment < 1 or ramp < 1 or start >= whole or (whole - start) % increment:
        raise ConfigError(
            flag,
            "does not lead to --global-batch-size",
            found=said,
            wanted=f"START + a whole number of INCREMENTs = {whole}, each above 0, over 1 or more samples",
        )
    sizes = BatchSizes(whole, start, increment, ramp, multiple)
    for size in sizes.sizes:
        if size < each or (size % each and not run.batch.decrease):
            raise ConfigError(
                flag,
                "has a size that is not a multiple of micro-batch size x data-parallel size",
                found=f"{size} of {said}",
                wanted=f"multiples of {each}",
                hint="--decrease-batch-size-if-needed rounds down" if size >= each else "",
            )
    return sizes


def check_duration(train: Train) -> Iterator[MegaError]:
    """Steps or samples, of which there must be one.

    Yields:
        an error where neither is given, or both, or a value is out of range.
    """
    iterations, samples = train.iterations, train.samples
    if samples is None:
        wanted(iterations, "--train-iters", "optimizer steps", "--train-iters 1000")
    elif iterations is None:
        wanted(samples, "--train-samples", "samples", "--train-samples 100000")
    else:
        found = f"{iterations} and {samples}"
        yield ConfigError("--train-samples", "excludes --train-iters", found=found, wanted="one of them")


def duration(train: Train, batches: BatchSizes) -> int:
    """Optimizer steps in all, of a run that `check_duration` accepts.

    Raises:
        ConfigError: the samples do not fill a step.
    """
    iterations, samples = train.iterations, train.samples
    if samples is None:
        assert iterations is not None
        return iterations
    steps = batches.steps(samples)
    if steps < 1:
        least = f"{batches.at(0)} or more, a step's"
        raise ConfigError("--train-samples", "not enough for a step", found=samples, wanted=least)
    return steps


def passed_over(run: Run) -> tuple[range, ...]:
    """The steps that --skip-train-iteration-range names, none twice and in their order.

    Raises:
        ConfigError: a text is not a range of steps.
    """
    flag, steps = "--skip-train-iteration-range", set[int]()
    for text in run.train.passed_over:
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ConfigError(
                flag, "is not a range of steps", found=text, wanted="FIRST-LAST, such as 100-120"
            )
        steps.update(range(int(first), int(last) + 1))
    begins = [step for step in sorted(steps) if step - 1 not in steps]
    ends = [step for step in sorted(steps) if step + 1 not in steps]
    return tuple(range(first, last + 1) for first, last in zip(begins, ends, strict=True))


def evaluated(run: Run) -> Run:
    """A run that only validates, with what else a run would have to say of its training.

    Raises:
        ConfigError: there is nothing to validate.
    """
    if run.evaluation.iterations == 0:
        hint = "--eval-iters 100"
        raise ConfigError("--skip-train", "there is nothing else to do", found="--eval-iters 0", hint=hint)
    train, optimizer = run.train, run.optimizer
    if train.iterations is None and train.samples is None:
        train = replace(train, iterations=1)
    return replace(run, train=train, optimizer=replace(optimizer, lr=optimizer.lr or 1.0))


def check_counts(run: Run) -> Iterator[MegaError]:
    """Intervals, counts and the seed.

    Yields:
        an error where a value is out of range.
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
