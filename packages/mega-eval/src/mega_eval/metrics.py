"""Metrics with what a reader needs to judge them: standard error, 95 % interval, count and definition.

An estimator takes one number per example. Examples count as independent draws; where they are not, as the
windows of one text, the interval is too narrow, and the definition of the metric says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
# a difference of two independent means is found at the 5 % level with a power of 80 %: z(0.975) + z(0.8)
_DETECTION_Z = 1.959963984540054 + 0.8416212335729143
MAX_EXPONENT = 700.0  # exp of more overflows a float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that a task computed.

    Attributes:
        value: the number; perplexities are exp of nats.
        definition: what it is, in one sentence: the convention that was followed.
        count: examples it was computed from; tokens or words, where the definition says so.
        stderr: its standard error; None where none is defined.
        interval: its 95 % interval; None without a standard error, or where it is 0 (not of a proportion).
        higher_is_better: False for losses and perplexities; None where neither is better.
        example_score: the key of `Example.scores` whose mean it is, or whose sums it is made from. Two
            results are compared by it, example by example. None: the metric cannot be paired.
        scale, max_exponent: how the value is made from r = Σ score / Σ weight over the examples: it is
            scale · r, or, where `max_exponent` is a number, exp(min(max_exponent, scale · r)).
    """

    value: float
    definition: str
    count: int
    stderr: float | None = None
    interval: tuple[float, float] | None = None
    higher_is_better: bool | None = None
    example_score: str | None = None
    scale: float = 1.0
    max_exponent: float | None = None

    @property
    def detectable(self) -> float | None:
        """The smallest difference from an equally uncertain, independent result that is detected.

        At the 5 % level with a power of 80 %: 2.80 · √2 · stderr. A paired comparison (`mega-eval compare`)
        detects less. None without a standard error, and where it is 0: equal scores of all examples, as an
        accuracy of 1, do not say how much they vary.
        """
        return None if not self.stderr else _DETECTION_Z * math.sqrt(2) * self.stderr


def proportion(hits: Sequence[bool], definition: str, *, example_score: str | None = None) -> Metric:
    """Return the fraction of hits; its interval is Wilson's (1927), which stays within 0 and 1.

    The standard error is that of lm-evaluation-harness, √(p (1 - p) / (n - 1)).
    """
    count = len(hits)
    value = sum(map(bool, hits)) / count
    stderr = math.sqrt(value * (1 - value) / max(1, count - 1))
    centre = (value + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 * math.sqrt(value * (1 - value) / count + Z95**2 / (4 * count**2)) / (1 + Z95**2 / count)
    return Metric(
        value=value,
        definition=definition,
        count=count,
        stderr=stderr,
        interval=(max(0.0, centre - half), min(1.0, centre + half)),
        higher_is_better=True,
        example_score=example_score,
    )


def mean(
    values: Sequence[float],
    definition: str,
    *,
    higher_is_better: bool | None = None,
    example_score: str | None = None,
) -> Metric:
    """Return the mean of one number per example, with a normal interval."""
    ones = np.ones(len(values))
    return ratio(values, ones, definition, higher_is_better=higher_is_better, example_score=example_score)


def ratio(
    numerators: Sequence[float] | npt.NDArray[np.float64],
    denominators: Sequence[float] | npt.NDArray[np.float64],
    definition: str,
    *,
    higher_is_better: bool | None = None,
    example_score: str | None = None,
) -> Metric:
    """Return Σ numerators / Σ denominators over the examples, as nats per token.

    The standard error is the linearised one of a ratio (Cochran, Sampling Techniques, 1977, section 6.5).
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    count, total = len(top), float(bottom.sum())
    value = float(top.sum()) / total
    stderr = interval = None
    if count > 1:
        residual = top - value * bottom
        stderr = math.sqrt(count / (count - 1) * float(residual @ residual)) / total
        # equal scores of all examples, as an F1 of 0, do not say how much they vary
        interval = (value - Z95 * stderr, value + Z95 * stderr) if stderr else None
    return Metric(
        value=value,
        definition=definition,
        count=count,
        stderr=stderr,
        interval=interval,
        higher_is_better=higher_is_better,
        example_score=example_score,
    )


def exponential(
    metric: Metric, definition: str, *, scale: float = 1.0, max_exponent: float = MAX_EXPONENT
) -> Metric:
    """Return exp(scale · metric): a perplexity from nats.

    The interval is exp of the metric's own, and the standard error is the delta method's.

    Args:
        scale: nats per word from nats per token, for example.
        max_exponent: the exponent is cut off here.
    """

    def clip_exp(nats: float) -> float:
        return math.exp(min(max_exponent, scale * nats))

    value = clip_exp(metric.value)
    return Metric(
        value=value,
        definition=definition,
        count=metric.count,
        stderr=None if metric.stderr is None else value * scale * metric.stderr,
        interval=None
        if metric.interval is None
        else (clip_exp(metric.interval[0]), clip_exp(metric.interval[1])),
        higher_is_better=metric.higher_is_better,
        example_score=metric.example_score,
        scale=scale * metric.scale,
        max_exponent=max_exponent,
    )


def scale_metric(metric: Metric, factor: float, definition: str) -> Metric:
    """Return factor · metric: bits per byte from nats per token."""
    assert metric.max_exponent is None, "a multiple of a perplexity is no ratio of sums"
    interval = metric.interval
    return Metric(
        value=factor * metric.value,
        definition=definition,
        count=metric.count,
        stderr=None if metric.stderr is None else factor * metric.stderr,
        interval=None if interval is None else (factor * interval[0], factor * interval[1]),
        higher_is_better=metric.higher_is_better,
        example_score=metric.example_score,
        scale=factor * metric.scale,
        max_exponent=metric.max_exponent,
    )
