"""Line charts by matplotlib, which is an optional dependency and slow to import: only functions import it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

COLORS = ("#2f6f9f", "#c2571a", "#3d8b4f", "#8b5fb0", "#b8860b", "#c04a6b", "#2a9393", "#7a6a58")  # of runs
_MUTED, _GRID, _PAGE = "#59636e", "#eaeef2", "#ffffff"
_CSS_COLORS = ((_MUTED, "var(--muted)"), (_GRID, "var(--grid)"), (_PAGE, "var(--page)"))  # light or dark
_WIDTH, _HEIGHT = 940, 260  # pixels of an SVG
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 10, 26  # its margins; they leave room for the tick labels
_MAX_POINTS = 400  # points drawn of a curve; more are averaged
_MAX_MARKED_POINTS = 40  # points of a curve up to which each is marked
_MIN_LOG = 1e-200  # lowest value of a logarithmic axis; below it powers of ten run out


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one run, in the order of `xs`.

    Attributes:
        ys: values; NaN where one is missing.
        dots: draw points joined by a thin line: values far apart.
        hollow: draw larger points with an empty middle.
    """

    name: str
    color: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    hollow: bool = False


def require_matplotlib(command: str) -> None:
    """Check that matplotlib is installed.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(command, "needs matplotlib", hint=install_hint("mega-train", "plot")) from None


def chart_style(key: str) -> AbstractContextManager[None]:
    """Return a context to draw and write a figure in; it ignores the user's matplotlibrc.

    Args:
        key: seed of the ids of an SVG, so that equal input gives equal bytes.
    """
    import matplotlib.style

    settings = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": key,
        "path.simplify": False,
        "text.parse_math": False,  # a $ in the name of a run is a $
        "font.family": "DejaVu Sans",
        "font.size": 11,
        **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _MUTED),
        **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": _GRID},
        **{"axes.xmargin": 0, "ytick.major.size": 0},
    }
    return matplotlib.style.context(["default", settings])


def render_chart(
    key: str,
    curves: Sequence[Curve],
    caption: str,
    *,
    marks: Sequence[tuple[float, str, str]] = (),
    zero: bool = False,
    log: bool = False,
) -> str:
    """Render a chart as an HTML figure with an inline SVG; return "" if no curve has a point.

    Args:
        key: prefix of the SVG ids, unique in the page: KEY-1, KEY-2 and on for curves, then for marks.
        marks: vertical lines: position, title, color.
        zero: start the vertical axis at 0.
        log: use a logarithmic vertical axis if all values are above 0.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    curves = [curve for curve in curves if curve.xs]
    if not curves:
        return ""
    text = io.StringIO()
    with chart_style(key):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        axes = figure.subplots()
        figure.subplots_adjust(_LEFT / _WIDTH, _BOTTOM / _HEIGHT, 1 - _RIGHT / _WIDTH, 1 - _TOP / _HEIGHT)
        lines = draw_curves(axes, curves, zero=zero, log=log, marks=marks)
        for number, line in enumerate(lines, 1):
            line.set_gid(f"{key}-{number}")
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(text, metadata=no_metadata)
    svg = _inline_svg(text.getvalue(), caption)
    for number, title in enumerate([*(curve.name for curve in curves), *(title for _, title, _ in marks)], 1):
        group = f'<g id="{key}-{number}">'
        svg = svg.replace(group, f"{group}<title>{escape(title)}</title>")
    legend = "".join(
        f'<span class="key{" dots" if curve.dots else ""}"><span style="'
        f'{"border:2px solid " if curve.hollow else "background:"}{curve.color}"></span>'
        f"{escape(curve.name)}</span>"
        for curve in curves
    )
    return f"<figure>{svg}<figcaption>{legend}{escape(caption)}</figcaption></figure>"


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    *,
    zero: bool = False,
    log: bool = False,
    marks: Sequence[tuple[float, str, str]] = (),
) -> list[Line2D]:
    """Draw curves, then marks, and scale both axes; the arguments are those of `render_chart`.

    A missing value is a gap. A curve of over 400 points becomes means in a band from minimum to maximum.
    """
    from matplotlib.ticker import Locator, LogLocator, MaxNLocator

    lowest = min((y for curve in curves for y in curve.ys if math.isfinite(y)), default=0.0)
    log = log and lowest > _MIN_LOG
    axes.set_yscale("log" if log else "linear")
    lines = [_draw_curve(axes, curve) for curve in curves]
    xs = [x for curve in curves for x in curve.xs] + [x for x, _, _ in marks] or [0.0]
    left = 0.0 if 0 <= min(xs) <= max(xs) / 10 else min(xs)
    around = 0.0 if left < max(xs) else abs(left) / 10 or 1.0
    axes.set_xlim(left - around, max(xs) + around)
    if zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0] if lowest < 0 else 0.0))
    bottom, top = axes.get_ylim()
    locator: Locator = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])
    if log and top > 3 * bottom:
        digits = (1.0, 2.0, 5.0) if top > 20 * bottom else (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        locator = LogLocator(subs=(1.0,) if top > 1000 * bottom else digits)
    axes.yaxis.set_major_locator(locator)
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: format_count(value))
    return lines + [axes.axvline(x, color=color, ls=":", lw=2, clip_on=False) for x, _, color in marks]


def _draw_curve(axes: Axes, curve: Curve) -> Line2D:
    xs, means, lows, highs = _average(curve)
    if len(xs) < len(curve.xs):
        axes.fill_between(xs, lows, highs, color=curve.color, alpha=0.2, linewidth=0, clip_on=False)
    is_short = len(xs) <= _MAX_MARKED_POINTS
    marked = np.isfinite(means)
    if not (is_short or curve.dots):  # mark values between two gaps: no line shows them
        marked &= ~np.append(marked[1:], False) & ~np.append(False, marked[:-1])
    (line,) = axes.plot(
        xs,
        means,
        color=curve.color,
        linestyle="--" if curve.dots else "-",
        linewidth=1 if curve.dots else 1.6,
        marker="o" if marked.any() else "",
        markevery=np.flatnonzero(marked),
        markersize=(6 if is_short else 3) + 4 * curve.hollow,
        markerfacecolor=_PAGE if curve.hollow else curve.color,
        markeredgewidth=2 if curve.hollow else 0,
        clip_on=False,
    )
    return line


def _average(curve: Curve) -> list[NDArray[np.float64]]:
    """Return positions, means, minima and maxima of at most 400 groups of successive points."""
    size = math.ceil(len(curve.xs) / _MAX_POINTS)
    points = np.full((2, math.ceil(len(curve.xs) / size) * size), np.nan)
    points[:, : len(curve.xs)] = curve.xs, curve.ys
    xs, ys = np.ma.masked_invalid(points).reshape(2, -1, size)
    return [part.filled(np.nan) for part in (xs.mean(1), ys.mean(1), ys.min(1), ys.max(1))]


def _inline_svg(svg: str, label: str) -> str:
    """Prepare matplotlib's SVG for embedding in a page: the page's colors, short numbers, unique ids.

    The SVG holds no text of the user.
    """
    svg = svg[svg.index("</defs>") + len("</defs>") :]  # the head, and a style for the whole page
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # repeated in every chart
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    for color, name in _CSS_COLORS:
        svg = svg.replace(color, name)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{svg}'


def format_count(value: float) -> str:
    """Format a large number: 12,500 as 12.5k."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
