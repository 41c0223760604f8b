"""Render the counts of a cleaning run as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mega_schema.app import html_page as frame
from mega_schema.app.counts import format_count

_MAX_LANGUAGES = 12  # shown; the others are one row


def render_report(title: str, steps: Sequence[Mapping[str, Any]], skipped: int = 0) -> str:
    """Render the report as HTML.

    Args:
        steps: the result of `Cleaning.report`.
        skipped: number of lines that are not documents.
    """
    body = [_overview(steps)]
    if skipped:
        lines = format_count(skipped, "line is not a document", "lines are not documents")
        body.append(f"<p>{lines}; see quarantine/.</p>")
    for number, step in enumerate(steps, 1):
        body.append(f"<h2>{number}. {escape(step['step'])}</h2>")
        body.append(_reasons(step))
        body.append(_count_replaced(step["replaced"]))
        body.append(_languages(step["languages"]))
        body.append(_lengths(step))
        body.append(_examples(step["examples"]))
    return frame.render_page(title, "".join(body))


def _overview(steps: Sequence[Mapping[str, Any]]) -> str:
    head = ("step", "documents in", "out", "kept", "MB in", "MB out", "changed")
    rows = []
    largest = max((step["documents_in"] for step in steps), default=0) or 1
    for step in steps:
        into, out = step["documents_in"], step["documents_out"]
        rows.append(
            f"<tr><td>{escape(step['step'])}</td><td class=n>{into:,}</td><td class=n>{out:,}</td>"
            f"<td>{_bar(into, out, largest)} {out / max(1, into):.1%}</td>"
            f"<td class=n>{step['bytes_in'] / 1e6:,.2f}</td>"
            f"<td class=n>{step['bytes_out'] / 1e6:,.2f}</td><td class=n>{step['changed']:,}</td></tr>"
        )
    note = "<p>MB count text; for duplicates, whole lines.</p>"
    return _table(head, rows) + note


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    numbers = (
        "documents in",
        "out",
        "MB in",
        "MB out",
        "changed",
        "documents",
        "share",
        "characters",
        "occurrences",
    )
    return frame.render_table(head, rows, numbers)


def _reasons(step: Mapping[str, Any]) -> str:
    reasons = step["reasons"]
    if not reasons:
        return "<p>No document was dropped.</p>"
    return _counts(("reason", "documents", "share"), reasons, step["documents_in"])


def _count_replaced(replaced: Mapping[str, int]) -> str:
    if not replaced:
        return ""
    return _counts(("replaced", "occurrences", "share"), replaced, sum(replaced.values()))


def _languages(languages: Mapping[str, int]) -> str:
    if not languages:
        return ""
    shown = dict(sorted(languages.items(), key=lambda item: (-item[1], item[0]))[:_MAX_LANGUAGES])
    if others := sum(languages.values()) - sum(shown.values()):
        shown[f"{len(languages) - len(shown)} others"] = others
    return _counts(("language", "documents", "share"), shown, sum(languages.values()))


def _counts(head: Sequence[str], counts: Mapping[str, int], total: int) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td class=n>{count:,}</td><td class=n>{count / max(1, total):.2%}</td>"
        f'<td><span class="bar" style="width:{200 * count / max(1, total):.1f}px"></span></td></tr>'
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return _table((*head, ""), rows)


def _lengths(step: Mapping[str, Any]) -> str:
    """Count documents by length before and after, a row for each power of two."""
    before = {int(length): count for length, count in step["lengths_in"].items()}
    after = {int(length): count for length, count in step["lengths_out"].items()}
    if not before:
        return ""
    longest_bar = max([*before.values(), *after.values()])
    rows = []
    for length in range(min([*before, *after]), max([*before, *after]) + 1):
        into, out = before.get(length, 0), after.get(length, 0)
        rows.append(
            f"<tr><td class=n>{_bin_title(length)}</td><td class=n>{into:,}</td><td class=n>{out:,}</td>"
            f"<td>{_bar(into, out, longest_bar)}</td></tr>"
        )
    return _table(("characters", "documents in", "out", ""), rows)


def _bar(into: int, out: int, longest: int) -> str:
    """Draw the documents that a step kept (dark) and dropped (pale)."""
    return "".join(
        f'<span class="{name}" style="width:{100 * count / longest:.1f}px"></span>'
        for name, count in (("bar", out), ("bar out", into - out))
        if count > 0
    )


def _bin_title(length: int) -> str:
    return f"{1 << (length - 1):,} to {(1 << length) - 1:,}" if length else "0"


def _examples(examples: Mapping[str, Sequence[str]]) -> str:
    parts = [
        f"<details><summary>dropped: {escape(reason)}</summary>"
        + "".join(f"<pre>{escape(text)}</pre>" for text in texts)
        + "</details>"
        for reason, texts in examples.items()
    ]
    return "".join(parts)
