"""Print the figures of a run, in the layout of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mega_serve.client.bench.latency_metrics import METRICS, percentile_key

_WIDTH: Final = 54
_LABEL: Final = 42
# from this share of a core on, the client's own work delays what it measures
BUSY_CLIENT_SHARE: Final = 0.8


def format_report(
    summary: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]
) -> Iterator[str]:
    """Yield the lines of the report."""
    yield " Serving Benchmark Result ".center(_WIDTH, "=")
    rows: list[tuple[str, object]] = [
        ("Successful requests:", summary["completed"]),
        ("Failed requests:", summary["failed"]),
        ("Maximum request concurrency:", summary["max_concurrency"]),
        (
            "Request rate configured (RPS):",
            summary["request_rate"] if summary["request_rate"] != "inf" else None,
        ),
        ("Benchmark duration (s):", summary["duration"]),
        ("Total input tokens:", summary["total_input_tokens"]),
        ("Total generated tokens:", summary["total_output_tokens"]),
        ("Request throughput (req/s):", summary["request_throughput"]),
        ("Request goodput (req/s):", summary["request_goodput"]),
        ("Output token throughput (tok/s):", summary["output_throughput"]),
        ("Peak output token throughput (tok/s):", summary["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", summary["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", summary["total_token_throughput"]),
        ("Client CPU (share of a core):", summary["client_cpu_share"]),
        ("Client send lag, maximum (ms):", summary["client_max_send_lag_ms"]),
    ]
    yield from (_row(label, value) for label, value in rows if value is not None)
    for metric in metrics:
        yield METRICS[metric].center(_WIDTH, "-")
        short = metric.upper() if metric != "client_queue_time" else "Client Queue Time"
        names = [("Mean", f"mean_{metric}_ms"), ("Median", f"median_{metric}_ms")]
        names += [(percentile_key(p).upper(), f"{percentile_key(p)}_{metric}_ms") for p in percentiles]
        yield from (_row(f"{name} {short} (ms):", summary[key]) for name, key in names)
    yield "=" * _WIDTH


def _row(label: str, value: object) -> str:
    text = "not measured" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{label:<{_LABEL}}{text:<12}".rstrip()
