"""Render the statistics of a corpus as one self-contained HTML page with inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any, Final

from mega_data.corpus_stats.length_bins import EDGES
from mega_schema.app import html_page
from mega_schema.app.counts import format_count

_WIDTH: Final = 760  # pixels of a plot
_HEIGHT: Final = 190
_LEFT: Final = 64  # margin for the labels of the axis
_BOTTOM: Final = 24
_TOP: Final = 8
_DIGIT: Final = 7  # width of a digit
_BARS: Final = 30  # values in a plot of frequent ones
_INPUTS: Final = 200  # rows
_LABELS: Final = 8  # of the horizontal axis
_STYLE: Final = """
.plot rect { fill: #2f6f9f } .plot text { fill: var(--muted); font-size: 11px; font-family: inherit }
.plot line { stroke: var(--grid) } @media (prefers-color-scheme: dark) { .plot rect { fill: #5b9bd0 } }
"""
_TITLES: Final = MappingProxyType({"domains": "Domains", "languages": "Languages"})


def render_stats(title: str, report: Mapping[str, Any]) -> str:
    """Render the result of `CorpusStats.report` as HTML."""
    inputs = len(report["inputs"])
    places = format_count(inputs, "input")
    body = [f"<p>{format_count(report['documents'], 'document')} in {places}.</p>"]
    if report["skipped"]:
        words = ("line is not a document and was skipped", "lines are not documents and were skipped")
        skipped = format_count(report["skipped"], *words)
        body.append(f"<p>{skipped}.</p>")
    body.append(_summary_table(report["lengths"]))
    for name, summary in report["lengths"].items():
        body.append(f"<h2>{escape(name.capitalize())} of a document</h2>")
        body.append(_plot_histogram(summary["histogram"], f"Documents by {name}, four bins per doubling"))
    for name, summary in report["frequent"].items():
        body.append(f"<h2>{escape(_TITLES.get(name, f'Values of {name}'))}</h2>")
        body.append(_describe(summary))
        body.append(_plot_bars(summary, report["documents"]))
    body.append("<h2>Inputs</h2>")
    body.append(_inputs_table(report["inputs"]))
    return html_page.render_page(title, "".join(body), _STYLE)


def _summary_table(lengths: Mapping[str, Mapping[str, Any]]) -> str:
    percentiles = next(iter(lengths.values()))["percentiles"] if lengths else {}
    head = ("", "documents", "total", "mean", "minimum", *(f"{p} %" for p in percentiles), "maximum")
    rows = []
    for name, summary in lengths.items():
        numbers = [
            f"{summary['count']:,}",
            f"{summary['total']:,}",
            f"{summary['mean']:,.1f}",
            f"{summary['minimum']:,}",
            *(f"{number:,}" for number in summary["percentiles"].values()),
            f"{summary['maximum']:,}",
        ]
        cells = "".join(f"<td class=n>{number}</td>" for number in numbers)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    note = "<p>A percentile is the largest number of its bin, at most 19 % above the exact one.</p>"
    return html_page.render_table(head, rows, head[1:]) + note


def _plot_histogram(bins: Sequence[Mapping[str, int]], caption: str) -> str:
    """Draw a bar for each bin, also for the empty ones between the first and the last."""
    if not bins:
        return "<p>No documents.</p>"
    counts = {row["from"]: row["count"] for row in bins}
    first, last = EDGES.index(bins[0]["from"]), EDGES.index(bins[-1]["from"])
    highest = max(counts.values())
    width = (_WIDTH - _LEFT) / (last - first + 1)
    height = _HEIGHT - _TOP - _BOTTOM
    base = _HEIGHT - _BOTTOM
    parts = []
    for count in sorted({0, highest // 2, highest}):
        y = base - count / highest * height
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{count:,}</text>')
    every = max(1, -(-(last - first + 1) // _LABELS))
    for position, number in enumerate(range(first, last + 1)):
        x = _LEFT + position * width
        if position % every == 0:
            label = f"{EDGES[number]:,}"
            x_label = min(x, _WIDTH - _DIGIT * len(label))
            parts.append(f'<text x="{x_label:.1f}" y="{_HEIGHT - 6}">{label}</text>')
        if count := counts.get(EDGES[number], 0):
            bar = max(1.0, count / highest * height)
            title = f"{EDGES[number]:,} to {EDGES[number + 1] - 1:,}: {format_count(count, 'document')}"
            parts.append(
                f'<rect x="{x:.1f}" y="{base - bar:.1f}" width="{max(1.0, width - 1):.1f}" '
                f'height="{bar:.1f}"><title>{title}</title></rect>'
            )
    return _figure("".join(parts), _HEIGHT, caption)


def _describe(summary: Mapping[str, Any]) -> str:
    if summary["error"]:
        return (
            f"<p>Too many different values to count all: a count is at most {summary['error']:,} too low.</p>"
        )
    return f"<p>{summary['different']:,} different values; the counts are exact.</p>"


def _plot_bars(summary: Mapping[str, Any], documents: int) -> str:
    rows = []
    counts = dict([*summary["top"].items()][:_BARS])
    longest = max(counts.values(), default=1)
    for name, count in counts.items():
        share = count / max(1, documents)
        rows.append(
            f"<tr><td>{escape(name[:80])}</td><td class=n>{count:,}</td><td class=n>{share:.2%}</td>"
            f'<td><svg class="plot" width="300" height="12" role="img" aria-label="{share:.2%}">'
            f'<rect width="{max(1.0, 300 * count / longest):.1f}" height="12"/></svg></td></tr>'
        )
    if rest := summary["total"] - sum(counts.values()):
        share = rest / max(1, documents)
        rows.append(
            f"<tr><td>all others</td><td class=n>{rest:,}</td><td class=n>{share:.2%}</td><td></td></tr>"
        )
    return html_page.render_table(("value", "documents", "share", ""), rows, ("documents", "share"))


def _inputs_table(inputs: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in inputs for name in row if name != "input"))
    rows = []
    for row in inputs[:_INPUTS]:
        cells = "".join(f"<td class=n>{row[n]:,}</td>" if n in row else "<td></td>" for n in names)
        rows.append(f"<tr><td>{escape(row['input'])}</td>{cells}</tr>")
    more = len(inputs) - len(rows)
    note = f"<p>{more:,} more inputs are in report.json.</p>" if more else ""
    return html_page.render_table(("input", *names), rows, names) + note


def _figure(content: str, height: int, caption: str) -> str:
    svg = (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(caption)}">{content}</svg>'
    )
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
