"""Line charts as SVG: self-contained, scalable, with values under the pointer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 940, 260
_LEFT, _RIGHT, _TOP, _FOOT = 64, 24, 10, 26  # margins that leave room for the label under the last tick
_MAX_POINTS = 400  # points drawn of a curve; more are averaged
_MAX_MARKED_POINTS = 40  # points of a line up to which each is marked
_HOVER_COLUMNS = 120  # positions at which the pointer shows values

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one run, in the order of `xs`.

    Attributes:
        dots: drawn as points that a thin line joins: values far apart.
        hollow: its points are larger, with a white middle.
    """

    name: str
    color: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart.

    Attributes:
        x_name: name of the horizontal axis.
        marks: positions on it with a text each.
        zero: the vertical axis begins at 0.
        log: it is logarithmic, where all values are above 0.
        shown: formats a value.
    """

    lines: Sequence[Curve]
    x_name: str
    caption: str
    marks: Sequence[tuple[float, str, str]] = ()  # place, words, colour
    zero: bool = False
    log: bool = False
    shown: Format = "{:,.4g}".format

    def svg(self) -> str:
        """Render the chart as an HTML figure; empty where there is no point."""
        lines = [line for line in self.lines if line.xs]
        if not lines:
            return ""
        xs = [x for line in lines for x in line.xs] + [x for x, _, _ in self.marks]
        ys = [y for line in lines for y in line.ys]
        log = self.log and min(ys) > 1e-200  # below it powers of ten run out
        first = 0.0 if 0 <= min(xs) <= max(xs) / 10 else min(xs)
        across = _Axis.fit(first, max(xs), _LEFT, WIDTH - _RIGHT)
        low = min(0.0, *ys) if self.zero else min(ys)
        upright = _Axis.fit(low, max(ys), HEIGHT - _FOOT, _TOP, log=log, wide=True)
        parts = [_draw_grid(across, upright, self.shown)]
        parts += [_draw_mark(across(x), words, color) for x, words, color in self.marks]
        parts += [_draw_curve(line, across, upright) for line in lines]
        parts.append(_draw_hover(lines, across, self))
        legend = "".join(
            f'<span class="key{" dots" if line.dots else ""}"><span style="{_swatch_style(line)}"></span>'
            f"{escape(line.name)}</span>"
            for line in lines
        )
        return (
            f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'aria-label="{escape(self.caption)}">{"".join(parts)}</svg>'
            f"<figcaption>{legend}{escape(self.caption)}</figcaption></figure>"
        )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Mapping from values to positions on the drawing."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    @classmethod
    def fit(
        cls, low: float, high: float, begin: float, end: float, *, log: bool = False, wide: bool = False
    ) -> _Axis:
        """Fit an axis to the values; `wide` leaves some space above them."""
        if log:
            low, high = math.log10(low), math.log10(high)
        if high == low:
            spread = abs(high) / 10 or 1.0
            low, high = (low, high + spread) if low == 0 else (low - spread, high + spread)
        elif wide:
            high += (high - low) / 20
            low -= 0 if low == 0 else (high - low) / 20
        return cls(low, high, begin, end, log)

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return about three to nine round values."""
        if self.log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            for digits in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8)):
                round_ones = [digit * 10.0**power for power in powers for digit in digits]
                within = [value for value in round_ones if self.low <= math.log10(value) <= self.high]
                if len(within) >= 3:
                    return within[:: 1 + len(within) // 10]
            return [10 ** (self.low + part * (self.high - self.low)) for part in (0.1, 0.5, 0.9)]
        rough = (self.high - self.low) / 7
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [step * number for number in range(first, last + 1)]


def _draw_grid(across: _Axis, upright: _Axis, shown: Format) -> str:
    parts = []
    for value in upright.ticks():
        y = upright(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eaeef2"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown(value)}</text>'
        )
    base = HEIGHT - _FOOT
    parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}" stroke="#59636e"/>')
    for value in across.ticks():
        x = across(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" stroke="#59636e"/>'
            f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{format_count(value)}</text>'
        )
    return "".join(parts)


def format_count(value: float) -> str:
    """Format a large number: 12,500 as 12.5k."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def _draw_mark(x: float, words: str, color: str) -> str:
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _FOOT}" stroke="{color}">'
        f"<title>{escape(words)}</title></line>"
    )


def _draw_curve(line: Curve, across: _Axis, upright: _Axis) -> str:
    """Draw a curve; too many points become means in a band from minimum to maximum."""
    size = math.ceil(len(line.xs) / _MAX_POINTS)
    parts = [
        (line.xs[i : i + size], [upright(y) for y in line.ys[i : i + size]])
        for i in range(0, len(line.xs), size)
    ]
    x_positions = [across(sum(xs) / len(xs)) for xs, _ in parts]
    means = [sum(ys) / len(ys) for _, ys in parts]
    svg = ""
    if size > 1:
        above = [(x, min(ys)) for x, (_, ys) in zip(x_positions, parts, strict=True)]
        below = [(x, max(ys)) for x, (_, ys) in zip(x_positions, parts, strict=True)]
        band = _format_points([*above, *reversed(below)])
        svg += f'<polygon points="{band}" fill="{line.color}" opacity=".2"/>'
    path = _format_points(list(zip(x_positions, means, strict=True)))
    style = 'stroke-width="1" stroke-dasharray="3 3"' if line.dots else 'stroke-width="1.6"'
    svg += f'<polyline points="{path}" fill="none" stroke="{line.color}" {style}/>'
    if line.dots or len(x_positions) <= _MAX_MARKED_POINTS:
        radius = 3 if len(x_positions) <= _MAX_MARKED_POINTS else 1.5
        fill = (
            f'fill="#fff" stroke="{line.color}" stroke-width="2"' if line.hollow else f'fill="{line.color}"'
        )
        svg += "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius + 2 * line.hollow}" {fill}/>'
            for x, y in zip(x_positions, means, strict=True)
        )
    return svg


def _swatch_style(line: Curve) -> str:
    """Return the style of a curve's mark in the legend."""
    return f"background:#fff;border:2px solid {line.color}" if line.hollow else f"background:{line.color}"


def _format_points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _draw_hover(lines: Sequence[Curve], across: _Axis, chart: Chart) -> str:
    """Draw columns that show the nearest values under the pointer."""
    longest = max(lines, key=lambda line: len(line.xs)).xs
    columns = min(_HOVER_COLUMNS, len(longest))
    column_width = (WIDTH - _RIGHT - _LEFT) / columns
    parts = []
    for column in range(columns):
        left = _LEFT + column * column_width
        middle = across.low + (column + 0.5) / columns * (across.high - across.low)
        index = _nearest_index(longest, middle)
        lines_of_text = [f"{chart.x_name} {longest[index]:,.6g}"]
        for line in lines:
            nearest = _nearest_index(line.xs, longest[index])
            if line.xs[nearest] == longest[index] or not line.dots:
                lines_of_text.append(f"{line.name}: {chart.shown(line.ys[nearest])}")
        parts.append(
            f'<rect class="at" x="{left:.1f}" width="{column_width:.1f}" '
            f'y="{_TOP}" height="{HEIGHT - _FOOT - _TOP}">'
            f"<title>{escape(chr(10).join(lines_of_text))}</title></rect>"
        )
    return "".join(parts)


def _nearest_index(xs: Sequence[float], x: float) -> int:
    index = bisect_left(xs, x)
    if index in (0, len(xs)):
        return min(index, len(xs) - 1)
    return index if xs[index] - x < x - xs[index - 1] else index - 1
