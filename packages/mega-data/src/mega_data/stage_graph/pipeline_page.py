"""Render the report of a pipeline: documents, bytes, reasons and time of each stage, as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mega_schema.app import html_page

_BAR_PIXELS = 160
_HEAD = ("stage", "command", "documents in", "documents out", "", "MB in", "MB out", "seconds", "state")
_REASONS = 15  # per stage


def render_pipeline(title: str, stages: Sequence[Mapping[str, Any]]) -> str:
    """Render the stages as HTML.

    Args:
        stages: fields of a `StageRecord` with `name`, `state` and `report`, a link or "".
    """
    counts = [count for stage in stages for count in (stage["documents_in"], stage["documents_out"]) if count]
    largest = max(counts, default=1)
    rows = [_row(stage, largest) for stage in stages]
    body = [html_page.render_table(_HEAD, rows, _HEAD[2:4] + _HEAD[5:8])]
    body.append("<p>MB are sizes of files. Seconds are of the process that finished the stage.</p>")
    for stage in stages:
        body.append(f"<h2>{escape(stage['name'])}</h2>")
        if stage["report"]:
            body.append(f'<p><a href="{escape(stage["report"])}">Report of {escape(stage["name"])}</a></p>')
        body.append(_reasons(stage))
        lines = f"{stage['command']}\n{stage['printed']}".rstrip("\n")
        body.append(f"<details><summary>Command and result</summary><pre>{escape(lines)}</pre></details>")
    return html_page.render_page(title, "".join(body))


def _row(stage: Mapping[str, Any], largest: int) -> str:
    into, out = stage["documents_in"], stage["documents_out"]
    command = stage["command"].split()[1] if stage["command"] else ""
    numbers = [_count(into), _count(out), *(f"{stage[f'bytes_{end}'] / 1e6:,.2f}" for end in ("in", "out"))]
    numbers.append(f"{stage['seconds']:,.1f}")
    cells = [f"<td class=n>{number}</td>" for number in numbers]
    cells.insert(2, f"<td>{_bar(into, out, largest)}</td>")
    names = f"<td>{escape(stage['name'])}</td><td>{escape(command)}</td>"
    return f"<tr>{names}{''.join(cells)}<td>{escape(stage['state'])}</td></tr>"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _bar(into: int | None, out: int | None, largest: int) -> str:
    """Draw the documents of the output (dark) and the dropped ones (pale)."""
    remaining = (into or 0) if out is None else out
    parts = (("bar", remaining), ("bar out", (into or 0) - remaining))
    return "".join(
        f'<span class="{name}" style="width:{_BAR_PIXELS * count / largest:.1f}px"></span>'
        for name, count in parts
        if count > 0
    )


def _reasons(stage: Mapping[str, Any]) -> str:
    dropped = sorted(stage["dropped"].items(), key=lambda item: (-item[1], item[0]))
    if not dropped:
        return ""
    total = stage["documents_in"] or 1
    rows = [
        f"<tr><td>{escape(reason)}</td><td class=n>{count:,}</td><td class=n>{count / total:.2%}</td></tr>"
        for reason, count in dropped[:_REASONS]
    ]
    if rest := sum(count for _, count in dropped[_REASONS:]):
        rows.append(f"<tr><td>other reasons</td><td class=n>{rest:,}</td><td></td></tr>")
    return html_page.render_table(("dropped", "documents", "share"), rows, ("documents", "share"))
