"""Check the options of logging, profiling and evaluation by other programs."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Iterator

from mega_schema.errors import ConfigError, MegaError
from mega_train.config import LoggingConfig, ProfileConfig, RunConfig


def check_log(log: LoggingConfig) -> Iterator[MegaError]:
    """Check levels, rates, sizes and addresses.

    Yields:
        an error if a value is out of range.
    """
    if log.timing_level not in (0, 1, 2):
        yield ConfigError("--timing-log-level", "not a level", found=log.timing_level, wanted="0, 1 or 2")
    if log.peak_tflops is not None and not 0 < log.peak_tflops < math.inf:
        yield ConfigError("--peak-tflops", "not a rate", found=log.peak_tflops, wanted="more than 0")
    if log.prometheus_port is not None and not 0 <= log.prometheus_port < 1 << 16:
        flag = "--prometheus-port"
        yield ConfigError(flag, "not a port", found=log.prometheus_port, wanted="0 to 65535")
    if log.opentelemetry_endpoint is not None and not log.opentelemetry_endpoint.startswith("http"):
        yield ConfigError(
            "--opentelemetry-endpoint",
            "not the address of a collector",
            found=log.opentelemetry_endpoint,
            wanted="http://HOST:PORT",
            hint="--opentelemetry-endpoint http://localhost:4318",
        )
    if not re.fullmatch("[A-Z]{3}", log.codecarbon_country):
        yield ConfigError(
            "--codecarbon-country",
            "not the code of a country",
            found=log.codecarbon_country,
            wanted="three capital letters of ISO 3166",
            hint="--codecarbon-country FRA",
        )
    if log.tensorboard_queue < 1:
        flag = "--tensorboard-queue-size"
        yield ConfigError(flag, "not a size", found=log.tensorboard_queue, wanted="1 or more")


def check_evaluations(run: RunConfig) -> Iterator[MegaError]:
    """Check the commands that evaluate checkpoints.

    Yields:
        an error if no checkpoint is saved at a validation, or a command cannot run.
    """
    flag = "--evaluation-commands"
    if not run.evaluation.commands:
        return
    save, interval = run.checkpoint.save, run.checkpoint.interval
    if save is None:
        yield ConfigError(flag, "needs checkpoints", wanted="--save", hint="--save RUN --save-interval N")
    elif interval is not None and math.lcm(interval, run.evaluation.interval) != interval:
        yield ConfigError(
            flag,
            "evaluates checkpoints that are saved at a validation",
            found=f"--save-interval {interval}, --eval-interval {run.evaluation.interval}",
            wanted="--save-interval as a multiple of --eval-interval",
        )
    for command in run.evaluation.commands:
        try:
            words = shlex.split(command)
        except ValueError as error:
            yield ConfigError(flag, "not a command", found=command, wanted=str(error).lower())
            continue
        if not words or shutil.which(words[0]) is None:
            hint = f"{flag} 'mega-eval lambada --data FILE'"
            yield ConfigError(flag, "no such program", found=words[0] if words else repr(command), hint=hint)
        elif repeated := {"--load", "--output"} & {word.partition("=")[0] for word in words}:
            yield ConfigError(flag, "the run names checkpoint and result", found=", ".join(sorted(repeated)))


def check_profile(profile: ProfileConfig) -> Iterator[MegaError]:
    """Check the profiled steps and ranks.

    Yields:
        an error if there is no step to profile, or a rank is not a number.
    """
    if not 0 <= profile.start < profile.end:
        yield ConfigError(
            "--profile-step-end",
            "no step is between the two",
            found=f"{profile.start} to {profile.end}",
            wanted="an end after --profile-step-start",
        )
    if -1 in profile.rank_numbers:
        found = " ".join(profile.ranks)
        yield ConfigError("--profile-ranks", "not numbers of ranks", found=found, wanted="such as 0 8")
