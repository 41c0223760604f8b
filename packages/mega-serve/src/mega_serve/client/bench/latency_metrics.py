"""Latency and throughput of a run, under the names and definitions of `vllm bench serve`.

TTFT  time to first token: from sending a request to its first chunk with output
TPOT  time per output token: (E2EL - TTFT) / (output tokens - 1), of requests with two tokens or more
ITL   inter-token latency: time between two chunks of one request, of all requests together
E2EL  end-to-end latency: from sending a request to its last chunk

ITL and TPOT differ if a chunk has several tokens. Percentiles interpolate linearly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

METRICS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ttft": "Time to First Token",
        "tpot": "Time per Output Token (excl. 1st token)",
        "itl": "Inter-token Latency",
        "e2el": "End-to-end Latency",
        "client_queue_time": "Client-side Queueing",
    }
)
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")
DETAIL_KEYS: Final = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "latencies",
    "queue_times",
    "generated_texts",
    "errors",
)


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """The measurements of one request. All times in seconds.

    Attributes:
        prompt_tokens: as the server counts them, or else as the workload does.
        output_tokens: as the server counts them, or else the number of chunks.
        start_time: on the client's clock, when the request was sent.
        latency: from start_time to the last chunk.
        ttft: from start_time to the first chunk; None if the answer was not streamed.
        itls: times between the chunks.
        queue_time: from the planned arrival to start_time.
        error: "" if the request succeeded.
    """

    prompt_tokens: int
    output_tokens: int = 0
    start_time: float = 0.0
    latency: float = 0.0
    ttft: float | None = None
    itls: list[float] = field(default_factory=list)
    queue_time: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came."""
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Return seconds per output token after the first; None for one token, or without streaming."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def summarize(
    results: Sequence[RequestResult],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures of a run, under vLLM's keys.

    Statistics of no values are None: nothing was measured. Throughput counts completed requests only.

    Args:
        duration: seconds of the run.
        metrics: those of METRICS to report.
        percentiles: 0 to 100.
        goodput: upper bounds in milliseconds by metric; empty reports no goodput.
    """
    completed = [result for result in results if result.is_completed]
    input_tokens = sum(result.prompt_tokens for result in completed)
    output_tokens = sum(result.output_tokens for result in completed)
    good = sum(_meets(result, goodput) for result in completed)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(completed),
        "failed": len(results) - len(completed),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(completed) / duration,
        "request_goodput": good / duration if goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "input_lens": [result.prompt_tokens for result in results],
        "output_lens": [result.output_tokens if result.is_completed else 0 for result in results],
        "ttfts": [result.ttft for result in results],
        "itls": [result.itls for result in results],
        "latencies": [result.latency for result in results],
        "start_times": [result.start_time for result in results],
        "queue_times": [result.queue_time for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
        "max_output_tokens_per_s": peak_output_rate(completed),
        "max_concurrent_requests": peak_concurrency(completed),
    }
    for metric in metrics:
        summary |= _statistics(metric, metric_values(metric, completed), percentiles)
    return summary


def metric_values(metric: str, results: Sequence[RequestResult]) -> list[float]:
    """Return the values of a metric in seconds, as far as the requests have it."""
    match metric:
        case "ttft":
            return [result.ttft for result in results if result.ttft is not None]
        case "tpot":
            return [tpot for result in results if (tpot := result.tpot) is not None]
        case "itl":
            return [gap for result in results for gap in result.itls]
        case "e2el":
            return [result.latency for result in results]
        case "client_queue_time":
            return [result.queue_time for result in results]
    raise ValueError(metric)


def percentile_key(percentile: float) -> str:
    """Return "p99" for 99.0 and "p99.9" for 99.9."""
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def output_rates(results: Sequence[RequestResult]) -> list[float]:
    """Return the output tokens of each second of the run.

    The tokens of a request are distributed evenly over its chunks.
    """
    if not results:
        return []
    start = min(result.start_time for result in results)
    end = max(result.start_time + result.latency for result in results)
    rates = np.zeros(math.floor(end - start) + 1)
    for result in results:
        first = result.latency if result.ttft is None else result.ttft
        times = result.start_time - start + first + np.concatenate(([0.0], np.cumsum(result.itls)))
        # rounding of sums can pass the end of the run by a few units in the last place
        seconds = np.minimum(times.astype(int), len(rates) - 1)
        np.add.at(rates, seconds, result.output_tokens / len(times))
    return [float(rate) for rate in rates]


def peak_output_rate(results: Sequence[RequestResult]) -> float:
    """Return the output tokens of the best second of the run."""
    return max(output_rates(results), default=0.0)


def concurrency_steps(results: Sequence[RequestResult]) -> list[tuple[float, int]]:
    """Return when the number of running requests changes, and the new number."""
    changes = [(result.start_time, 1) for result in results]
    changes += [(result.start_time + result.latency, -1) for result in results]
    steps = []
    running = 0
    for time, change in sorted(changes):  # of two at one time, the end counts first
        running += change
        steps.append((time, running))
    return steps


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Return the largest number of requests that ran at one time."""
    return max((running for _, running in concurrency_steps(results)), default=0)


def _meets(result: RequestResult, bounds: Mapping[str, float]) -> bool:
    """Whether a request is within all bounds; one of a single token has a TPOT of 0, as in vLLM."""
    values = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.latency}
    return all(
        (value := values[metric]) is not None and value * 1000 <= bound for metric, bound in bounds.items()
    )


def _statistics(
    metric: str, values: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    names = [f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms"]
    names += [f"{percentile_key(percentile)}_{metric}_ms" for percentile in percentiles]
    if not values:
        return dict.fromkeys(names)
    milliseconds = np.asarray(values) * 1000
    figures = [milliseconds.mean(), np.median(milliseconds), milliseconds.std()]
    figures += list(np.percentile(milliseconds, list(percentiles)))
    return {name: float(figure) for name, figure in zip(names, figures, strict=True)}
