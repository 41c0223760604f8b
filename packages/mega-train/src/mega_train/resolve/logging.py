"""Check the options of logging and profiling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from mega_schema.errors import ConfigError, MegaError
from mega_train.config import LoggingConfig, ProfileConfig


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
