"""How weights move: checks of the optimizer, and the learning rate's course."""

from __future__ import annotations

import math

from mega_schema.errors import ConfigError
from mega_train.config import Run
from mega_train.rates import LearningRate
from mega_train.resolve.given import wanted


def check_optimizer(run: Run) -> None:
    """Numbers an update can be made with.

    Raises:
        ConfigError: a value is out of range.
    """
    o = run.optimizer
    for flag, beta in (("--adam-beta1", o.beta1), ("--adam-beta2", o.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(flag, "does not decay", found=beta, wanted="0 or more, and less than 1")
    if not 0 < o.eps < math.inf:
        # with 0, a weight that had no gradient yet would become 0 / 0
        raise ConfigError("--adam-eps", "not above 0", found=o.eps, wanted="a small number, such as 1e-8")
    for flag, value in (("--weight-decay", o.weight_decay), ("--clip-grad", o.clip)):
        if not 0 <= value < math.inf:
            raise ConfigError(flag, "not a number that can be used", found=value, wanted="0 or more")


def learning_rate(run: Run, iterations: int, global_samples: int) -> LearningRate:
    """The course of the learning rate, in samples.

    Raises:
        ConfigError: two flags of it disagree, or a value is out of range.
    """
    o = run.optimizer
    peak = wanted(o.lr, "--lr", "a learning rate", "--lr 3e-4")
    steps = iterations
    if o.decay_iterations is not None:
        steps = wanted(o.decay_iterations, "--lr-decay-iters", "optimizer steps", "--lr-decay-iters 1000")
    decay = steps * global_samples
    if o.warmup_fraction is not None and o.warmup_iterations:
        raise ConfigError(
            "--lr-warmup-fraction", "excludes --lr-warmup-iters", found="both", wanted="one of them"
        )
    if o.warmup_fraction is not None:
        warmup = o.warmup_fraction * decay
    else:
        warmup = float(o.warmup_iterations * global_samples)
    if not 0 <= warmup < decay:
        raise ConfigError(
            "--lr-warmup-iters" if o.warmup_fraction is None else "--lr-warmup-fraction",
            "the warm-up does not end before the decay does",
            found=f"{warmup / global_samples:g} of {steps} steps",
            wanted="0 or more, and fewer than --lr-decay-iters (by default --train-iters)",
        )
    if not 0 <= o.min_lr <= peak:
        raise ConfigError("--min-lr", "is not between 0 and --lr", found=o.min_lr, wanted=f"0 to {peak}")
    return LearningRate(peak=peak, least=o.min_lr, warmup=warmup, decay=decay, style=o.decay_style)
