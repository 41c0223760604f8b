"""Check the optimizer, and build the learning-rate and weight-decay schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from mega_schema.errors import ConfigError, MegaError
from mega_train.config import OptimizerConfig, RunConfig
from mega_train.resolve.required import require_positive
from mega_train.schedules.batch_size import BatchSizeRampup
from mega_train.schedules.lr import LRSchedule, ParamSchedules, WeightDecaySchedule


def check_optimizer(run: RunConfig) -> Iterator[MegaError]:
    """Check the optimizer's constants.

    Yields:
        an error if a value is out of range.
    """
    config = run.optimizer
    for flag, beta in (
        ("--adam-beta1", config.beta1),
        ("--adam-beta2", config.beta2),
        ("--sgd-momentum", config.sgd_momentum),
        ("--muon-momentum", config.muon_momentum),
    ):
        if not 0 <= beta < 1:
            yield ConfigError(flag, "does not decay", found=beta, wanted="0 or more, and less than 1")
    if not 0 < config.eps < math.inf:
        # with 0, a weight that had no gradient yet would become 0 / 0
        yield ConfigError(
            "--adam-eps", "not above 0", found=config.eps, wanted="a small number, such as 1e-8"
        )
    for flag, value in (("--weight-decay", config.weight_decay), ("--clip-grad", config.clip)):
        if not 0 <= value < math.inf:
            yield ConfigError(flag, "not a finite number of 0 or more", found=value, wanted="0 or more")


def peak_lr(optimizer: OptimizerConfig) -> float:
    """Return --lr, which every run needs.

    Raises:
        ConfigError: it is missing or not above 0.
    """
    return require_positive(optimizer.lr, "--lr", "a learning rate", "--lr 3e-4")


def param_schedules(
    run: RunConfig,
    iterations: int,
    batch_size_schedule: BatchSizeRampup,
    loaded_schedules: ParamSchedules | None,
) -> ParamSchedules:
    """Build the schedules of learning rate and weight decay; a resumed run keeps those it started with.

    Args:
        loaded_schedules: those of the checkpoint.

    Raises:
        ConfigError: flags disagree with each other or with the checkpoint, or a value is out of range.
    """
    config = run.optimizer
    if config.override_schedule and config.checkpoint_schedule:
        flag, other_flag = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
        raise ConfigError(flag, f"excludes {other_flag}", found="both", wanted="one of them")
    if loaded_schedules is not None and config.checkpoint_schedule:
        return loaded_schedules
    end = run.train.samples or iterations * batch_size_schedule.full
    lr = lr_schedule(run, end, batch_size_schedule.full)
    schedules = ParamSchedules(lr, weight_decay_schedule(run, end), _decoupled_lr_schedule(run, lr))
    if loaded_schedules is not None and not config.override_schedule:
        _check_resumed_schedules(schedules, loaded_schedules, run, batch_size_schedule.full)
    return schedules


def _check_resumed_schedules(
    schedules: ParamSchedules, loaded_schedules: ParamSchedules, run: RunConfig, full: int
) -> None:
    unit: Literal["iters", "samples"] = "iters" if run.train.samples is None else "samples"
    current = schedules.resume_fields(unit)
    recorded = loaded_schedules.resume_fields(unit)
    different = [flag for flag, value in recorded.items() if current.get(flag, value) != value]
    decay, warmup = f"--lr-decay-{unit}", f"--lr-warmup-{unit}"
    warmup_fraction = run.optimizer.warmup_fraction
    if (
        {decay, warmup} <= {*different}
        and warmup_fraction is not None
        and recorded[warmup] == warmup_fraction * recorded[decay]
    ):
        different.remove(warmup)  # it changed with the decay, of which it is the same fraction
    if not different:
        return
    flag = different[0]
    what = "is not that of the resumed run"
    found, wanted = _format_value(current[flag]), _format_value(recorded[flag])
    if flag.endswith(f"-{unit}"):
        found, wanted = (_format_length(fields[flag], unit, full) for fields in (current, recorded))
    if flag == decay and not (run.optimizer.decay_iterations or run.optimizer.decay_samples):
        flag = "--epochs" if run.task.name else f"--train-{unit}"
        what = f"ends the decay of the learning rate elsewhere than in the resumed run, without {decay}"
    elif flag == warmup and warmup_fraction is not None:
        flag = "--lr-warmup-fraction"
    raise ConfigError(
        flag,
        what,
        found=found,
        wanted=f"{wanted}, the checkpoint's",
        hint="--use-checkpoint-opt_param-scheduler keeps the checkpoint's schedules of learning rate "
        "and weight decay, --override-opt_param-scheduler uses these",
    )


def _format_length(samples: float, unit: Literal["iters", "samples"], full: int) -> str:
    """Format a length of a schedule, in steps if the run counts steps."""
    return f"{samples:g} samples" if unit == "samples" else f"{samples / full:g} steps of {full} samples"


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "none" if value is None else str(value)


def lr_schedule(run: RunConfig, end: int, full: int) -> LRSchedule:
    """Build the learning-rate schedule.

    Args:
        end: samples of the whole run.
        full: samples of a step of full size.

    Raises:
        ConfigError: two flags of it disagree, or a value is out of range.
    """
    config = run.optimizer
    samples = _samples_converter(run, full)
    peak = peak_lr(config)
    kind = "iters" if run.train.samples is None else "samples"
    decay = samples("--lr-decay", config.decay_iterations, config.decay_samples)
    decay = (
        end
        if decay is None
        else require_positive(decay, f"--lr-decay-{kind}", kind, f"--lr-decay-{kind} 1000")
    )
    steps = samples("--lr-warmup", config.warmup_iterations, config.warmup_samples)
    warmup = float(steps or 0)
    flag = f"--lr-warmup-{kind}"
    if config.warmup_fraction is not None and warmup:
        raise ConfigError("--lr-warmup-fraction", f"excludes {flag}", found="both", wanted="one of them")
    if config.warmup_fraction is not None:
        warmup = config.warmup_fraction * decay
        flag = "--lr-warmup-fraction"
    if not 0 <= warmup < decay:
        raise ConfigError(
            flag,
            "the warm-up does not end before the decay does",
            found=f"{warmup / full:g} of {decay // full} steps"
            if kind == "iters"
            else f"{warmup:g} of {decay} samples",
            wanted=f"0 or more, and fewer than --lr-decay-{kind} (by default --train-{kind})",
        )
    if not 0 <= config.min_lr <= peak:
        raise ConfigError("--min-lr", "is not between 0 and --lr", found=config.min_lr, wanted=f"0 to {peak}")
    if not 0 <= config.warmup_initial <= peak:
        raise ConfigError(
            "--lr-warmup-init",
            "is not between 0 and --lr",
            found=config.warmup_initial,
            wanted=f"0 to {peak}",
        )
    anneal = samples("--lr-wsd-decay", config.wsd_iterations, config.wsd_samples)
    flag = f"--lr-wsd-decay-{kind}"
    if config.decay_style != "WSD" and anneal is not None:
        raise ConfigError(flag, "applies to WSD only", found=config.decay_style, hint="--lr-decay-style WSD")
    if config.decay_style == "WSD":
        require_positive(anneal, flag, "how long the rate decays", f"{flag} 100")
    if anneal is not None and anneal > decay - warmup:
        raise ConfigError(
            flag,
            "the decay begins before the warm-up has ended",
            found=f"{anneal} samples",
            wanted=f"at most {decay - warmup:g}, those between warm-up and --lr-decay-{kind}",
        )
    return LRSchedule(
        peak=peak,
        least=config.min_lr,
        warmup=warmup,
        decay=decay,
        style=config.decay_style,
        initial=config.warmup_initial,
        anneal=anneal or 0,
        anneal_style=config.wsd_style,
    )


def _decoupled_lr_schedule(run: RunConfig, lr: LRSchedule) -> LRSchedule | None:
    """Build the schedule of embedding and output, if it differs."""
    peak_value, min_lr = run.optimizer.decoupled_lr, run.optimizer.decoupled_min_lr
    if peak_value is None and min_lr is None:
        return None
    if peak_value is None:
        raise ConfigError(
            "--decoupled-min-lr", "needs --decoupled-lr", found=min_lr, hint="--decoupled-lr 3e-4"
        )
    peak_value = require_positive(peak_value, "--decoupled-lr", "a learning rate", "--decoupled-lr 3e-4")
    min_lr = lr.least if min_lr is None else min_lr
    if not 0 <= min_lr <= peak_value:
        flag = "--decoupled-min-lr"
        raise ConfigError(
            flag, "is not between 0 and --decoupled-lr", found=min_lr, wanted=f"0 to {peak_value}"
        )
    return replace(lr, peak=peak_value, least=min_lr)


def weight_decay_schedule(run: RunConfig, end: int) -> WeightDecaySchedule:
    """Build the weight-decay schedule.

    Args:
        end: samples of the whole run.

    Raises:
        ConfigError: two flags of it disagree, or a value is out of range.
    """
    config = run.optimizer
    limits = {
        "--start-weight-decay": config.start_weight_decay,
        "--end-weight-decay": config.end_weight_decay,
    }
    if config.weight_decay_style == "constant":
        for flag, value in limits.items():
            if value is not None:
                hint = "--weight-decay-incr-style linear, or --weight-decay"
                raise ConfigError(flag, "the weight decay is constant", found=value, hint=hint)
        return WeightDecaySchedule(start=config.weight_decay, end=config.weight_decay, samples=end)
    for flag, value in limits.items():
        if value is None:
            raise ConfigError(flag, "missing", wanted=f"a decay, for {config.weight_decay_style}")
        if not 0 <= value < math.inf:
            raise ConfigError(flag, "not a finite number of 0 or more", found=value, wanted="0 or more")
    start, last = (float(value or 0) for value in limits.values())
    if start > last:
        raise ConfigError(
            "--end-weight-decay", "is below --start-weight-decay", found=last, wanted=f"{start} or more"
        )
    return WeightDecaySchedule(start=start, end=last, samples=end, style=config.weight_decay_style)


def _samples_converter(run: RunConfig, full: int) -> Callable[[str, int | None, int | None], int | None]:
    """Return a function that converts a length in steps or samples to samples."""

    def samples(flag: str, iterations: int | None, sample_count: int | None) -> int | None:
        counts_samples = run.train.samples is not None
        if conflicting := iterations if counts_samples else sample_count:
            wrong, right = ("iters", "samples") if counts_samples else ("samples", "iters")
            raise ConfigError(
                f"{flag}-{wrong}",
                f"the run is counted in {right}",
                found=conflicting,
                wanted=f"{flag}-{right}, as with --train-{right}",
            )
        if counts_samples:
            return sample_count
        return None if iterations is None else iterations * full

    return samples
