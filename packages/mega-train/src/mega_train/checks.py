"""Checks between two values of a run, for `resolve`: arithmetic and replicas."""

from __future__ import annotations

import math

from mega_schema.errors import ConfigError
from mega_train.config import Train


def check_precision(train: Train) -> None:
    """One dtype, and a loss scale that can be one.

    Raises:
        ConfigError: two flags exclude each other, or a value is out of range.
    """
    if train.fp16 and train.bf16:
        raise ConfigError("--fp16", "excludes --bf16", found="both", wanted="one of them")
    if train.loss_scale is not None and not train.fp16:
        hint = "leave it out"
        raise ConfigError("--loss-scale", "only float16 needs one", wanted="--fp16", hint=hint)
    scales = {
        "--loss-scale": train.loss_scale,
        "--initial-loss-scale": train.initial_loss_scale,
        "--min-loss-scale": train.min_loss_scale,
    }
    for flag, scale in scales.items():
        if scale is not None and not 0 < scale < math.inf:
            raise ConfigError(flag, "not a scale", found=scale, wanted="a number above 0, such as 65536")
    if train.min_loss_scale > train.initial_loss_scale:
        raise ConfigError(
            "--min-loss-scale",
            "is above --initial-loss-scale",
            found=train.min_loss_scale,
            wanted=f"at most {train.initial_loss_scale:g}",
        )
    for flag, count in (("--loss-scale-window", train.loss_scale_window), ("--hysteresis", train.hysteresis)):
        if count < 1:
            raise ConfigError(flag, "not a count", found=count, wanted="1 or more")


def check_dropout(train: Train) -> None:
    """Probabilities that leave something.

    Raises:
        ConfigError: a value is out of range.
    """
    given = {"--hidden-dropout": train.hidden_dropout, "--attention-dropout": train.attention_dropout}
    for flag, probability in given.items():
        if not 0 <= probability < 1:
            wanted = "0 or more, and less than 1"
            raise ConfigError(flag, "not a probability to drop with", found=probability, wanted=wanted)
