"""Plot a run: latency over time, distribution of latencies, throughput over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_serve.client.bench.latency_metrics import (
    RequestResult,
    concurrency_steps,
    metric_values,
    output_rates,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Okabe and Ito's colors, which color-blind readers can tell apart
_COLORS: Final = MappingProxyType({"ttft": "#0072B2", "e2el": "#D55E00", "tpot": "#009E73", "itl": "#CC79A7"})
_TITLES: Final = MappingProxyType(
    {
        "ttft": "time to first token",
        "e2el": "end to end",
        "tpot": "time per output token",
        "itl": "inter-token latency",
    }
)


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot", "needs matplotlib", hint=install_hint("mega-serve", "plot")) from None


def plot_run(results: Sequence[RequestResult], title: str, output: Path) -> None:
    """Draw the completed and the failed requests of a run as a PNG.

    Args:
        title: describes the run; may have several lines.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    completed = [result for result in results if result.is_completed]
    # the user's matplotlibrc must not change the picture
    with matplotlib.style.context(["default", {"font.family": "DejaVu Sans", "text.parse_math": False}]):
        figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
        figure.suptitle(title, fontsize="medium")
        (time_axes, cdf_axes), (rate_axes, running_axes) = figure.subplots(2, 2)
        start = min((result.start_time for result in results), default=0.0)
        _plot_latency(time_axes, results, start)
        _plot_distribution(cdf_axes, completed)
        _plot_output_rate(rate_axes, completed)
        _plot_concurrency(running_axes, completed, start)
        for axes in (time_axes, cdf_axes, rate_axes, running_axes):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        with atomic_write(output) as partial:
            figure.savefig(partial, format="png")


def _plot_latency(axes: Axes, results: Sequence[RequestResult], start: float) -> None:
    completed = [result for result in results if result.is_completed]
    for metric in ("e2el", "ttft"):
        points = [
            (result.start_time - start, values[0] * 1000)
            for result in completed
            if (values := metric_values(metric, [result]))
        ]
        if points:
            times, latencies = zip(*points, strict=True)
            axes.scatter(times, latencies, s=12, color=_COLORS[metric], label=_TITLES[metric])
    failures = [result.start_time - start for result in results if not result.is_completed]
    if failures:
        # along the bottom edge: a failed request has no latency
        bottom = axes.get_xaxis_transform()
        zeros = [0.0] * len(failures)
        axes.plot(
            failures, zeros, "x", color="black", transform=bottom, clip_on=False, label="failed requests"
        )
    axes.set_title("Latency by time of sending", loc="left", fontsize="medium")
    axes.set_xlabel("seconds from the start")
    axes.set_ylabel("milliseconds")
    _set_log_scale(
        axes.yaxis,
        axes.set_yscale,
        [value for m in ("ttft", "e2el") for value in metric_values(m, completed)],
    )
    if results:
        _add_legend(axes)


def _plot_distribution(axes: Axes, completed: Sequence[RequestResult]) -> None:
    all_values = []
    for metric, color in _COLORS.items():
        values = np.sort(metric_values(metric, completed)) * 1000
        if len(values):
            all_values += values.tolist()
            fractions = np.arange(1, len(values) + 1) / len(values) * 100
            axes.step(values, fractions, where="post", color=color, label=_TITLES[metric])
    axes.axhline(99, color="gray", linewidth=0.8, linestyle=":")
    axes.annotate("99 %", (1.0, 99), xycoords=("axes fraction", "data"), fontsize="x-small", color="gray")
    axes.set_title("Distribution", loc="left", fontsize="medium")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("% at or below")
    _set_log_scale(axes.xaxis, axes.set_xscale, all_values)
    if all_values:
        _add_legend(axes)


def _plot_output_rate(axes: Axes, completed: Sequence[RequestResult]) -> None:
    rates = output_rates(completed)
    if rates:
        axes.stairs(rates, np.arange(len(rates) + 1), fill=True, color="#56B4E9")
    axes.set_title("Output tokens of each second (the last one may be cut)", loc="left", fontsize="medium")
    axes.set_xlabel("seconds from the start")
    axes.set_ylabel("tokens")
    axes.set_ylim(bottom=0)


def _plot_concurrency(axes: Axes, completed: Sequence[RequestResult], start: float) -> None:
    steps = concurrency_steps(completed)
    if steps:
        axes.step([time - start for time, _ in steps], [running for _, running in steps], where="post")
    axes.set_title("Running requests", loc="left", fontsize="medium")
    axes.set_xlabel("seconds from the start")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)


def _set_log_scale(axis: Axis, set_scale: Callable[[str], None], values: Sequence[float]) -> None:
    """Use a logarithmic axis, with plain numbers, where the values differ by more than a factor of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    positive = [value for value in values if value > 0]
    if positive and max(positive) > 10 * min(positive):
        set_scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def _add_legend(axes: Axes) -> None:
    """Put the legend above the axes, beside the title, where it hides no point."""
    axes.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
