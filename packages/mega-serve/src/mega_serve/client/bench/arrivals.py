"""Arrival times of requests: Poisson and gamma processes, and rates that grow over the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RampUpStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class RampUp:
    """A request rate that changes from the first request to the last one.

    Attributes:
        start_rps, end_rps: requests per second; the first is above 0 and not above the second.
    """

    strategy: RampUpStrategy
    start_rps: float
    end_rps: float

    def rate_at(self, progress: float) -> float:
        """Return the rate after this fraction of the requests, 0 to 1."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def sample_arrivals(
    count: int,
    *,
    rate: float,
    burstiness: float,
    ramp_up: RampUp | None,
    generator: np.random.Generator,
) -> list[float]:
    """Return the times at which requests start, in seconds from the start of the run, ascending.

    The intervals have a gamma distribution of mean 1 / rate and shape `burstiness`: 1 is a Poisson process,
    less is burstier, infinity is a constant interval. Without a ramp-up the times are scaled so that the last
    request starts at count / rate, as vLLM does: the load is then the same for every seed.

    Args:
        rate: requests per second; infinity starts all at once.
        ramp_up: replaces `rate`.
    """
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    rates = (
        np.full(count, rate)
        if ramp_up is None
        else np.array([ramp_up.rate_at(i / max(count - 1, 1)) for i in range(count)])
    )
    if math.isinf(burstiness):
        intervals = 1.0 / rates
    else:
        intervals = generator.gamma(shape=burstiness, scale=1.0 / (rates * burstiness))
    times = np.cumsum(intervals)
    if ramp_up is None and times[-1] > 0:
        times *= count / rate / times[-1]
    return [float(time) for time in times]
