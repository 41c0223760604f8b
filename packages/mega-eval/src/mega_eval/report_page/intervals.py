"""Draw 95 % intervals as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

from mega_eval.metrics import Metric
from mega_eval.number_format import format_number

_WIDTH = 220  # pixels
_HEIGHT = 18
_MARGIN = 6


def draw_intervals(metrics: Sequence[Metric]) -> list[str]:
    """Draw each metric and its interval, all on one scale; "" for a metric without an interval."""
    drawn = [metric for metric in metrics if metric.interval is not None]
    ends = [end for metric in drawn for end in metric.interval or ()]
    ends += [metric.value for metric in drawn]
    return [
        "" if metric.interval is None else _draw(metric.value, metric.interval, min(ends), max(ends))
        for metric in metrics
    ]


def _draw(value: float, interval: tuple[float, float], lowest: float, highest: float) -> str:
    def position(number: float) -> str:
        part = (number - lowest) / (highest - lowest) if highest > lowest else 0.5
        return f"{_MARGIN + part * (_WIDTH - 2 * _MARGIN):.1f}"

    low, high = map(position, interval)
    middle = _HEIGHT // 2
    caps = "".join(f'<line x1="{x}" x2="{x}" y1="{middle - 4}" y2="{middle + 4}"/>' for x in (low, high))
    title = f"{format_number(value)}, 95 % from {' to '.join(map(format_number, interval))}"
    return (
        f'<svg class="interval" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{middle}" y2="{middle}"/>'
        f'<line x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>{caps}'
        f'<circle cx="{position(value)}" cy="{middle}" r="4"/></svg>'
    )
