"""The HTML page of one or more results: metrics, provenance and examples, in one file without links."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_eval.metrics import Metric
from mega_eval.number_format import can_detect, format_number
from mega_eval.report_page.examples_data import render_examples_data
from mega_eval.report_page.intervals import draw_intervals
from mega_eval.result_reader import EvaluationResult
from mega_schema.app.html_page import render_page, render_table
from mega_schema.atomic_io import atomic_write

_TOOLS = (
    '<div class="tools">{results}<label hidden>judged by <select id="judge"></select></label>'
    '<span role="group" aria-label="filter">'
    '<button type="button" data-filter="all">all <span></span></button> '
    '<button type="button" data-filter="right">right <span></span></button> '
    '<button type="button" data-filter="wrong">wrong <span></span></button></span>'
    '<label>search <input type="search" id="search" autocomplete="off"></label>'
    '<label>order <select id="order"><option value="file">as in the file</option>'
    '<option value="surprising">least probable first</option>'
    '<option value="expected">most probable first</option></select></label>'
    '<span id="status" class="muted" aria-live="polite"></span></div>'
)
_CANONICAL = MappingProxyType({True: "yes", False: "no", None: "no hash of one is known"})
_PAGER = (
    '<nav class="pager" aria-label="pages"><button type="button" data-step="-1">previous</button>'
    '<span class="position muted"></span><button type="button" data-step="1">next</button></nav>'
)
_LEGEND = (
    '<p class="muted">Tokens of the expected answer: P = 1 <span class="swatch"></span> P = e<sup>-10</sup> '
    "or less; underlined where another token was more probable. ● marks the expected choice. Keys: "
    "<kbd>/</kbd> search, <kbd>n</kbd> <kbd>p</kbd> page, <kbd>j</kbd> <kbd>k</kbd> example, <kbd>a</kbd> "
    "all, <kbd>r</kbd> right, <kbd>w</kbd> wrong.</p>"
)


def write_page(results: Sequence[EvaluationResult], output: Path) -> None:
    """Write the page of the results.

    Raises:
        FormatError: the examples of a result are missing or not those it was written with.
    """
    with atomic_write(output) as partial:
        partial.write_text(render_results(results), "utf-8")


def report_path(output: Path) -> Path:
    """Return the path of the page beside a result."""
    return output.with_name(output.name.removesuffix(".json") + ".html")


def render_results(results: Sequence[EvaluationResult]) -> str:
    """Return the HTML of the page."""
    labels = label_results(results)
    data = render_examples_data(results)
    script = _load("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = "".join(
        (
            f'<p class="lead">{escape(_describe(results))}</p>',
            *(_warning(result, label) for result, label in zip(results, labels, strict=True)),
            *(_metrics_section(group, labels) for group in _group_tasks(results)),
            f"<h2>Provenance</h2>{_provenance(results, labels)}",
            _examples_section(labels),
            f'<script type="application/json" id="examples-data">{data}</script><script>{script}</script>',
        )
    )
    tasks = dict.fromkeys(result.task for result in results)
    return render_page(
        f"Evaluation: {', '.join(tasks)}",
        body,
        _load("page.css"),
        head=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )


def label_results(results: Sequence[EvaluationResult]) -> list[str]:
    """Name each result by task, convention and model; equal names get the name of the file too."""
    labels = [
        " · ".join(filter(None, (result.task, result.convention, result.model_name))) for result in results
    ]
    return [
        f"{label} · {result.path.name}" if labels.count(label) > 1 else label
        for label, result in zip(labels, results, strict=True)
    ]


def _load(name: str) -> str:
    return resources.files("mega_eval.report_page").joinpath(name).read_text("utf-8")


def _describe(results: Sequence[EvaluationResult]) -> str:
    models = dict.fromkeys(result.model_name for result in results)
    dates = sorted(str(result.record["date"]) for result in results)
    return f"{', '.join(models)} · evaluated {dates[0]}" + (f" to {dates[-1]}" if len(set(dates)) > 1 else "")


def _warning(result: EvaluationResult, label: str) -> str:
    if result.record["publishable"]:
        return ""
    return f'<p class="warn">Not publishable: {escape(label)} left examples out.</p>'


def _group_tasks(results: Sequence[EvaluationResult]) -> list[list[tuple[int, EvaluationResult]]]:
    """Group results of one task and convention, with their positions."""
    groups: dict[tuple[str, str], list[tuple[int, EvaluationResult]]] = {}
    for index, result in enumerate(results):
        groups.setdefault((result.task, result.convention), []).append((index, result))
    return list(groups.values())


def _metrics_section(group: Sequence[tuple[int, EvaluationResult]], labels: Sequence[str]) -> str:
    first = group[0][1]
    title = " · ".join(filter(None, (first.task, first.convention)))
    models = [label.removeprefix(f"{title} · ") for label in labels]
    names = dict.fromkeys(name for _, result in group for name in result.metrics)
    rows = []
    for name in names:
        holders = [(index, result.metrics[name]) for index, result in group if name in result.metrics]
        drawings = draw_intervals([metric for _, metric in holders])
        for number, ((index, metric), drawing) in enumerate(zip(holders, drawings, strict=True)):
            head = _metric_head(name, metric, len(holders)) if number == 0 else ""
            model = f"<td>{escape(models[index])}</td>" if len(group) > 1 else ""
            rows.append(f"<tr>{head}{model}{_metric_cells(metric)}<td class=drawing>{drawing}</td></tr>")
    numbers = ("value", "95 % interval", "detectable", "count")
    table = render_table(["metric", *(["result"] if len(group) > 1 else []), *numbers, ""], rows, numbers)
    note = (
        '<p class="muted">detectable: the smallest difference from an equally uncertain, independent result '
        "that is found at the 5 % level with a power of 80 %. Too few examples: it is larger than any "
        "possible one.</p>"
    )
    return f'<h2>{escape(title)}</h2><div class="scroll">{table}</div>{note}'


def _metric_head(name: str, metric: Metric, rows: int) -> str:
    text = escape(name.replace("_", " "))
    return f'<td rowspan="{rows}">{text}<small>{escape(metric.definition)}</small></td>'


def _metric_cells(metric: Metric) -> str:
    interval = "" if metric.interval is None else " to ".join(map(format_number, metric.interval))
    detectable = ""
    if metric.detectable is not None:
        is_possible = can_detect(metric.value, metric.detectable, higher_is_better=metric.higher_is_better)
        detectable = format_number(metric.detectable) if is_possible else "too few examples"
    values = (format_number(metric.value), interval, detectable, f"{metric.count:,}")
    return "".join(f"<td class=n>{value}</td>" for value in values)


def _provenance(results: Sequence[EvaluationResult], labels: Sequence[str]) -> str:
    facts = [_facts(result.record) for result in results]
    rows = []
    for name in dict.fromkeys(name for values in facts for name in values):
        kind = "hash" if "sha256" in name else "wide"
        cells = "".join(f'<td class="{kind}">{escape(values.get(name, ""))}</td>' for values in facts)
        rows.append(f'<tr><td class="name">{escape(name)}</td>{cells}</tr>')
    table = render_table(["", *labels] if len(results) > 1 else ["", "value"], rows)
    return f'<div class="scroll">{table}</div>'


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    """Return name and text of everything that reproduces a result."""
    model = record["model"]
    facts = {
        "model": model["source"],
        "model sha256": model["sha256"],
        "tokenizer sha256": model["tokenizer_sha256"],
        "iteration": _number(model["iteration"]),
        "parameters": _number(model["parameters"]),
        "training tokens": _number(model["tokens"]),
        "dtype, device": f"{model['dtype']}, {model['device']}",
        "ranks": ", ".join(f"{axis} {size}" for axis, size in model["layout"].items()),
        "noise of ln P": "" if model["noise"] is None else f"{model['noise']:.2g}",
        "versions of the model": ", ".join(f"{name} {number}" for name, number in model["versions"].items()),
    }
    for number, entry in enumerate(record["data"], 1):
        suffix = f" {number}" if len(record["data"]) > 1 else ""
        facts[f"data{suffix}"] = f"{entry['path']} ({entry['bytes']:,} bytes)"
        facts[f"data{suffix} sha256"] = entry["sha256"]
    facts["published file"] = _CANONICAL[record["options"].get("canonical_data")]
    facts["options"] = ", ".join(f"{name} {value}" for name, value in record["options"].items())
    facts["counts"] = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in record["counts"].items())
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    facts["command"] = shlex.join(record["command"])
    facts["date"] = record["date"]
    speed = f"{record['seconds']:,} s, {record['tokens_per_second']:,} tokens/s"
    facts["time"] = f"{speed}, {record['tokens_read']:,} tokens read"
    return {name: text for name, text in facts.items() if text}


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _examples_section(labels: Sequence[str]) -> str:
    options = "".join(
        f'<option value="{index}">{escape(label)}</option>' for index, label in enumerate(labels)
    )
    hidden = " hidden" if len(labels) == 1 else ""
    select = f'<label{hidden}>result <select id="result">{options}</select></label>'
    tools = _TOOLS.replace("{results}", select)
    return f'<h2 id="examples">Examples</h2>{_LEGEND}{tools}{_PAGER}<div id="list"></div>{_PAGER}'
