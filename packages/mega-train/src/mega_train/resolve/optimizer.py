"""How weights move: checks of the optimizer, and the courses of learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from mega_schema.errors import ConfigError, MegaError
from mega_train.config import Optimizer, Run
from mega_train.resolve.required import wanted
from mega_train.schedules.batch_size import BatchSizes
from mega_train.schedules.lr import Courses, LearningRate, WeightDecay


def check_optimizer(run: Run) -> Iterator[MegaError]:
    """Numbers an update can be made with.

    Yields:
        an error where a value is out of range.
    """
    o = run.optimizer
    for flag, beta in (
        ("--adam-beta1", o.beta1),
        ("--adam-beta2", o.beta2),
        ("--sgd-momentum", o.sgd_momentum),
        ("--muon-momentum", o.muon_momentum),
    ):
        if not 0 <= beta < 1:
            yield ConfigError(flag, "does not decay", found=beta, wanted="0 or more, and less than 1")
    if not 0 < o.eps < math.inf:
        # with 0, a weight that had no gradient yet would become 0 / 0
        yield ConfigError("--adam-eps", "not above 0", found=o.eps, wanted="a small number, such as 1e-8")
    for flag, value in (("--weight-decay", o.weight_decay), ("--clip-grad", o.clip)):
        if not 0 <= value < math.inf:
            yield ConfigError(flag, "not a number that can be used", found=value, wanted="0 or more")


def peak_rate(optimizer: Optimizer) -> float:
    """--lr, which every run needs.

    Raises:
        ConfigError: it is missing or not above 0.
    """
    return wanted(optimizer.lr, "--lr", "a learning rate", "--lr 3e-4")


def courses(run: Run, iterations: int, batches: BatchSizes, loaded: Courses | None) -> Courses:
    """The courses of learning rate and weight decay; of a run that goes on, those it began with.

    Args:
        loaded: what the checkpoint says of them.

    Raises:
        ConfigError: flags disagree with each other or with the checkpoint, or a value is out of range.
    """
    o = run.optimizer
    if o.override_schedule and o.checkpoint_schedule:
        flag, other = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
        raise ConfigError(flag, f"excludes {other}", found="both", wanted="one of them")
    if loaded is not None and o.checkpoint_schedule:
        return loaded
    end = run.train.samples or iterations * batches.full
    rate = learning_rate(run, end, batches.full)
    said = Courses(rate, weight_decay(run, end), _ends(run, rate))
    if loaded is not None and not o.override_schedule:
        _check_same(said, loaded, run, batches.full)
    return said


def _check_same(said: Courses, loaded: Courses, run: Run, full: int) -> None:
    unit: Literal["iters", "samples"] = "iters" if run.train.samples is None else "samples"
    mine, before = said.matters(unit), loaded.matters(unit)
    other = [flag for flag, value in before.items() if mine.get(flag, value) != value]
    decay, warmup = f"--lr-decay-{unit}", f"--lr-warmup-{unit}"
    share = run.optimizer.warmup_fraction
    if {decay, warmup} <= {*other} and share is not None and before[warmup] == share * before[decay]:
        other.remove(warmup)  # it moved with the decay, of which it is the same share
    if not other:
        return
    flag, what = other[0], "is not that of the run that goes on"
    found, wanted = _short(mine[flag]), _short(before[flag])
    if flag.endswith(f"-{unit}"):
        found, wanted = (_length(course[flag], unit, full) for course in (mine, before))
    if flag == decay and not (run.optimizer.decay_iterations or run.optimizer.decay_samples):
        flag = f"--train-{unit}"
        what = f"ends the decay of the learning rate elsewhere than in the run that goes on, without {decay}"
    elif flag == warmup and share is not None:
        flag = "--lr-warmup-fraction"
    raise ConfigError(
        flag,
        what,
        found=found,
        wanted=f"{wanted}, the checkpoint's",
        hint="--use-checkpoint-opt_param-scheduler keeps the checkpoint's courses of learning rate "
        "and weight decay, --override-opt_param-scheduler takes these",
    )


def _length(samples: float, unit: Literal["iters", "samples"], full: int) -> str:
    """A length of a course: in steps too, where the run counts them."""
    return f"{samples:g} samples" if unit == "samples" else f"{samples / full:g} steps of {full} samples"


def _short(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else "none" if value is None else str(value)


def learning_rate(run: Run, end: int, full: int) -> LearningRate:
    """The course of the learning rate.

    Args:
        end: samples of the whole run.
        full: samples of a step of full size.

    Raises:
        ConfigError: two flags of it disagree, or a value is out of range.
    """
    o, samples = run.optimizer, _in_samples(run, full)
    peak = peak_rate(o)
    kind = "iters" if run.train.samples is None else "samples"
    decay = samples("--lr-decay", o.decay_iterations, o.decay_samples)
    decay = end if decay is None else wanted(decay, f"--lr-decay-{kind}", kind, f"--lr-decay-{kind} 1000")
    steps = samples("--lr-warmup", o.warmup_iterations, o.warmup_samples)
    warmup, flag = float(steps or 0), f"--lr-warmup-{kind}"
    if o.warmup_fraction is not None and warmup:
        raise ConfigError("--lr-warmup-fraction", f"excludes {flag}", found="both", wanted="one of them")
    if o.warmup_fraction is not None:
        warmup, flag = o.warmup_fraction * decay, "--lr-warmup-fraction"
    if not 0 <= warmup < decay:
        raise ConfigError(
            flag,
            "the warm-up does not end before the decay does",
            found=f"{warmup / full:g} of {decay // full} steps"
            if kind == "iters"
            else f"{warmup:g} of {decay} samples",
            wanted=f"0 or more, and fewer than --lr-decay-{kind} (by default --train-{kind})",
        )
    if not 0 <= o.min_lr <= peak:
        raise ConfigError("--min-lr", "is not between 0 and --lr", found=o.min_lr, wanted=f"0 to {peak}")
    if not 0 <= o.warmup_initial <= peak:
        raise ConfigError(
            "--lr-warmup-init", "is not between 0 and --lr", found=o.warmup_initial, wanted=f"0 to {peak}"
        )
    anneal = samples("--lr-wsd-decay", o.wsd_iterations, o.wsd_samples)
    flag = f"--lr-wsd-decay-{kind}"
    if o.decay_style != "WSD" and anneal is not None:
        raise ConfigError(flag, "is of WSD", found=o.decay_style, hint="--lr-decay-style WSD")
    if o.decay_style == "WSD":
        wanted(anneal, flag, "how long the rate decays", f"{flag} 100")
    if anneal is not None and anneal > decay - warmup:
        raise ConfigError(
            flag,
            "the decay begins before the warm-up has ended",
            found=f"{anneal} samples",
            wanted=f"at most {decay - warmup:g}, those between warm-up and --lr-decay-{kind}",
        )
    return LearningRate(
        peak=peak,
        least=o.min_lr,
        warmup=warmup,
        decay=decay,
        style=o.decay_style,
        initial=o.warmup_initial,
        anneal=anneal or 0,
        anneal_style=o.wsd_style,
    )


def _ends(run: Run, rate: LearningRate) -> LearningRate | None:
    """The course of embedding and output, where theirs is another."""
    peak, least = run.optimizer.ends_lr, run.optimizer.ends_min_lr
    if peak is None and least is None:
        return None
    if peak is None:
        raise ConfigError(
            "--decoupled-min-lr", "needs --decoupled-lr", found=least, hint="--decoupled-lr 3e-4"
        )
    peak = wanted(peak, "--decoupled-lr", "a learning rate", "--decoupled-lr 3e-4")
    least = rate.least if least is None else least
    if not 0 <= least <= peak:
        flag = "--decoupled-min-lr"
        raise ConfigError(flag, "is not between 0 and --decoupled-lr", found=least, wanted=f"0 to {peak}")
    return replace(rate, peak=peak, least=least)


def weight_decay(run: Run, end: int) -> WeightDecay:
    """The course of the weight decay.

    Args:
        end: samples of the whole run.

    Raises:
        ConfigError: two flags of it disagree, or a value is out of range.
    """
    o = run.optimizer
    given = {"--start-weight-decay": o.start_weight_decay, "--end-weight-decay": o.end_weight_decay}
    if o.weight_decay_style == "constant":
        for flag, value in given.items():
            if value is not None:
                hint = "--weight-decay-incr-style linear, or --weight-decay"
                raise ConfigError(flag, "the weight decay is constant", found=value, hint=hint)
        return WeightDecay(start=o.weight_decay, end=o.weight_decay, samples=end)
    for flag, value in given.items():
        if value is None:
            raise ConfigError(flag, "missing", wanted=f"a decay, for {o.weight_decay_style}")
        if not 0 <= value < math.inf:
            raise ConfigError(flag, "not a number that can be used", found=value, wanted="0 or more")
    start, last = (float(value or 0) for value in given.values())
    if start > last:
        raise ConfigError(
            "--end-weight-decay", "is below --start-weight-decay", found=last, wanted=f"{start} or more"
        )
    return WeightDecay(start=start, end=last, samples=end, style=o.weight_decay_style)


def _in_samples(run: Run, full: int) -> Callable[[str, int | None, int | None], int | None]:
    """Puts the two flags of a length, in steps and in samples, together; a run counts in one of them."""

    def samples(flag: str, iters: int | None, given: int | None) -> int | None:
        sampled = run.train.samples is not None
        if other := iters if sampled else given:
            wrong, right = ("iters", "samples") if sampled else ("samples", "iters")
            raise ConfigError(
                f"{flag}-{wrong}",
                f"the run is counted in {right}",
                found=other,
                wanted=f"{flag}-{right}, as with --train-{right}",
            )
        return given if sampled else None if iters is None else iters * full

    return samples
