"""Charts of results by matplotlib, which is an optional dependency: only functions import it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from mega_eval.comparison import MetricComparison
from mega_eval.outputs import check_output_file
from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import is_image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mega_eval.sweep import MetricSpread, SweepPoint

COLOR = "#2f6f9f"
_BETTER, _WORSE, _MUTED = "#3d8b4f", "#c2571a", "#59636e"
_ROW_INCHES = 0.34


def require_matplotlib(where: str, *, hint: str = "") -> None:
    """Check that matplotlib is installed.

    Args:
        where: the option or command that needs it; begins the message.
        hint: an alternative to installing it.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        command = install_hint("mega-eval", "plot")
        raise ConfigError(where, "needs matplotlib", hint=f"{command}, {hint}" if hint else command)


def check_plot(option: str, path: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Check that a PNG can be written.

    Args:
        overwrite: replace an existing image.

    Raises:
        ConfigError: matplotlib is not installed, or the path is not free for an image.
    """
    check_output_file(option, path, inputs, is_image, suffix=".png", overwrite=overwrite)
    require_matplotlib(option)


def chart_style() -> AbstractContextManager[None]:
    """Return a context to draw in; it ignores the user's matplotlibrc."""
    import matplotlib.style

    settings = {
        "text.parse_math": False,  # a $ in the name of a run is a $
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _MUTED,
        "axes.axisbelow": True,
        "grid.color": "#eaeef2",
    }
    return matplotlib.style.context(["default", settings])


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all."""
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png")


def draw_comparisons(comparisons: Sequence[MetricComparison], path: Path, *, level: float) -> None:
    """Draw the differences with their intervals, a panel for each metric, as a PNG.

    Args:
        level: of the false discovery rate; differences with a q-value below it have a colour.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[MetricComparison]] = {}
    for comparison in comparisons:
        panels.setdefault(comparison.metric, []).append(comparison)
    rows = [len(panel) for panel in panels.values()]
    height = sum(_ROW_INCHES * count + 0.85 for count in rows) + 0.3
    with chart_style():
        figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in rows])
        for panel_axes, (metric, panel) in zip(axes[:, 0], panels.items(), strict=True):
            _draw_panel(panel_axes, metric, panel, level)
        write_figure(figure, path)


def _draw_panel(axes: Axes, metric: str, panel: Sequence[MetricComparison], level: float) -> None:
    several_tasks = len({(c.task, c.convention) for c in panel}) > 1
    for row, comparison in enumerate(panel):
        verdict = comparison.verdict(level)
        color = {"better": _BETTER, "worse": _WORSE, "different": COLOR}.get(verdict, _MUTED)
        low, high = comparison.interval
        axes.plot([low, high], [row, row], color=color, linewidth=2, solid_capstyle="butt")
        axes.plot([comparison.difference], [row], "o", color=color, markersize=6)
    axes.axvline(0, color=_MUTED, linewidth=1, linestyle=":")
    labels = [f"{c.second} - {c.first}" for c in panel]
    if several_tasks:
        labels = [f"{c.task} {c.convention}: {label}" for c, label in zip(panel, labels, strict=True)]
    axes.set_yticks(range(len(panel)), labels)
    axes.set_ylim(len(panel) - 0.5, -0.5)
    axes.grid(axis="x")
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[panel[0].higher_is_better]
    axes.set_title(f"difference of {metric.replace('_', ' ')}{direction}", loc="left", fontsize=10)


def draw_sweep(points: Sequence[SweepPoint], spread: Mapping[str, MetricSpread], path: Path) -> None:
    """Draw each metric against tokens, with its intervals and the spread of the last checkpoints, as a PNG.

    The horizontal axis has iterations where a checkpoint does not say how many tokens were consumed.
    """
    from matplotlib.figure import Figure

    has_tokens = all(point.tokens is not None for point in points) and len({p.tokens for p in points}) > 1
    xs = [
        float(point.tokens if has_tokens and point.tokens is not None else point.iteration)
        for point in points
    ]
    names = list(spread)
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    with chart_style():
        figure = Figure(figsize=(5.5 * columns, 3.0 * rows), dpi=120, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, name in zip(axes.flat, names, strict=False):
            _draw_curve(panel, xs, points, name, spread[name])
            panel.set_xlabel("tokens" if has_tokens else "iteration")
        for panel in axes.flat[len(names) :]:
            panel.set_axis_off()
        write_figure(figure, path)


def _draw_curve(
    axes: Axes, xs: Sequence[float], points: Sequence[SweepPoint], name: str, spread: MetricSpread
) -> None:
    pairs = [(x, point.metrics[name]) for x, point in zip(xs, points, strict=True) if name in point.metrics]
    values = [metric.value for _, metric in pairs]
    intervals = [metric.interval or (metric.value, metric.value) for _, metric in pairs]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)]
    places = [x for x, _ in pairs]
    axes.errorbar(places, values, yerr=[below, above], color=COLOR, marker="o", markersize=4, capsize=2)
    text = f"last {spread.checkpoints}: {spread.mean:,.4g}"
    if spread.stdev is not None:
        low, high = spread.mean - spread.stdev, spread.mean + spread.stdev
        axes.fill_between(places[-spread.checkpoints :], low, high, color=COLOR, alpha=0.2, linewidth=0)
        text += f" ± {spread.stdev:.2g}"
    axes.set_title(f"{name.replace('_', ' ')}   {text}", loc="left", fontsize=10)
    axes.grid(axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))


def format_count(value: float) -> str:
    """Format a large number of tokens: 12,500,000 as 12.5M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
