"""Charts of results by matplotlib, which is an optional dependency: only functions import it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from mega_eval.comparison import MetricComparison
from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output, is_image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOR = "#2f6f9f"
_BETTER, _WORSE, _MUTED = "#3d8b4f", "#c2571a", "#59636e"
_ROW_INCHES = 0.34


def check_plot(option: str, path: Path, inputs: Sequence[Path] = ()) -> None:
    """Check that a PNG can be written.

    Raises:
        ConfigError: matplotlib is not installed, or the path is not free for an image.
    """
    if not path.parent.is_dir():
        raise ConfigError(option, "no such folder", found=path.parent, hint=f"mkdir -p {path.parent}")
    check_output(option, path, "file", inputs=inputs, is_ours=is_image)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(option, "needs matplotlib", hint=install_hint("mega-eval", "plot"))


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
