"""HTML report of a run: overview, curves, configuration; optionally compared with another run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_schema.app.config import to_dict
from mega_schema.app.html_page import render_page, render_table
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output, is_page
from mega_train.config import RunConfig
from mega_train.reports.charts import COLORS, Curve, render_chart, require_matplotlib
from mega_train.reports.loss_plot import loss_curves, term_curves
from mega_train.reports.run_history import RunHistory, XAxis
from mega_train.reports.run_names import name_runs

_STYLE = """
svg text { font-family: system-ui, sans-serif !important } .key { margin-right: 1em; color: var(--text) }
.key span { display: inline-block; width: 14px; height: 4px; margin-right: 5px; vertical-align: middle }
.dots span { width: 8px; height: 8px; border-radius: 50% }
td.l { font-family: ui-monospace, monospace; font-size: 13px }
"""
_X_NAMES: Mapping[XAxis, str] = MappingProxyType(
    {
        "iteration": "iteration",
        "samples": "samples consumed",
        "tokens": "tokens consumed",
        "hours": "hours of training",
    }
)


def write_report(run: Path, baseline: Path | None, output: Path, over: XAxis = "iteration") -> None:
    """Write the report.

    Args:
        run, baseline: folders given to --save.
        over: the horizontal axis.

    Raises:
        FormatError: a folder holds no event log, or one without a loss.
        ConfigError: matplotlib is not installed, or the folder of the report does not exist.
    """
    if not output.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=output.parent, hint=f"mkdir -p {output.parent}")
    check_output("--output", output, "file", is_ours=is_page)
    require_matplotlib("report")
    runs = [RunHistory.load(folder) for folder in (run, baseline) if folder is not None]
    with atomic_write(output) as partial:
        partial.write_text(render_report(runs, over), "utf-8")


def render_report(runs: Sequence[RunHistory], over: XAxis) -> str:
    """Render the report as HTML."""
    names = name_runs([run.folder for run in runs])
    body = [render_table(("", *names), _overview_table(runs), names)]
    if len(runs) == 2:
        body.append(_compare_losses(runs[0], runs[1], names))
    for title, figure in _charts(runs, names, over):
        if figure:
            body.append(f"<h2>{escape(title)}</h2>{figure}")
    body += ["<h2>Where the time of a step goes</h2>", _timers_table(runs, names)]
    body += ["<h2>Configuration</h2>", _config_table(runs, names)]
    title = f"{names[0]} against {names[1]}" if len(runs) == 2 else names[0]
    return render_page(title, "".join(body), _STYLE)


def _overview_table(runs: Sequence[RunHistory]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        for name, value in _overview_rows(run):
            rows.setdefault(name, [""] * len(runs))[number] = value
    return [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows.items()
    ]


def _overview_rows(run: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield the rows of the overview."""
    start = run.start
    last = run.train_logs[-1]
    if start:
        layout = " x ".join(f"{axis} {size}" for axis, size in start["layout"].items() if size > 1)
        family = f"{start['family']}, " if "family" in start else ""
        if objective := start.get("objective"):
            family += f"{objective}, "
        yield "model", f"{family}{start['parameters']:,} parameters"
        yield "ranks", f"{start.get('world', 1)}{f' ({layout})' if layout else ''} on {start['device']}"
        if start.get("kernels"):
            yield "kernels", start["kernels"]
    yield "iterations", f"{last['iteration']:,} of {last['iterations']:,}"
    yield "tokens", f"{run.positions([last['iteration']], 'tokens')[0]:,.0f}"
    losses = [line["loss"] for line in run.train_logs if line["loss"] is not None]
    if losses:
        yield "loss, last logged", f"{losses[-1]:.4f}"
    for term in run.loss_terms:
        values = [value for value in run.term_series(term, "iteration")[1] if not math.isnan(value)]
        if values:
            yield f"{term}, last logged", f"{values[-1]:.4f}"
    for group, scores in run.groups.items():
        yield f"{group} loss, last", f"{scores[-1]['loss']:.4f}"
        for term, value in scores[-1].get("loss_terms", {}).items():
            yield f"{group} {term}, last", f"{value:.4f}"
        if len(scores) > 1:
            yield f"{group} loss, best", f"{min(e['loss'] for e in scores):.4f}"
        if scores[-1]["perplexity"] is not None:
            yield f"{group} perplexity, last", f"{scores[-1]['perplexity']:.2f}"
        for metric, value in scores[-1].get("metrics", {}).items():
            yield f"{group} {metric}, last", f"{value:.4f}"
    for name, key, form in (
        ("tokens/s, median", "tokens_per_second", "{:,.0f}"),
        ("TFLOP/s per rank, median", "tflops", "{:.4g}"),
        ("MFU, median", "mfu", "{:.1%}"),
    ):
        if (value := run.median(key)) is not None:
            yield name, form.format(value)
    if memory := run.memory("iteration")[1]:
        yield "peak memory of rank 0", f"{np.nanmax(memory) / 1e9:.2f} GB"
    yield "training", _duration(3600 * run.positions([last["iteration"]], "hours")[0])
    for name, events, key in (
        ("validations", run.validations, "seconds"),
        ("checkpoints", run.checkpoints, "blocked_seconds"),
    ):
        if seconds := sum(e.get(key, 0.0) for e in events):
            failed = sum(bool(e.get("error")) for e in events)
            more = f", {failed} failed" if failed else ""
            yield f"{name}", f"{len(events)}, {_duration(seconds)} of training time{more}"
    if run.restarts:
        lost = sum(restart.lost for restart in run.restarts)
        yield "restarts", f"{len(run.restarts)}, {lost:,} steps repeated"
    if skipped := sum(line["skipped"] for line in run.train_logs):
        yield "steps without an update", f"{skipped:,}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def _compare_losses(run: RunHistory, baseline: RunHistory, names: Sequence[str]) -> str:
    """Compare two runs' losses at the iterations that both logged."""
    sentences = []
    curves = [("training loss", run.train_logs, baseline.train_logs)]
    curves += [(f"{group} loss", run.groups[group], baseline.groups.get(group, [])) for group in run.groups]
    for name, events, baseline_events in curves:
        baseline_losses = {e["iteration"]: e["loss"] for e in baseline_events if e["loss"] is not None}
        pairs = [
            (e["iteration"], e["loss"], baseline_losses[e["iteration"]])
            for e in events
            if e["iteration"] in baseline_losses
        ]
        pairs = [pair for pair in pairs if pair[1] is not None]
        if not pairs:
            continue
        apart = [abs(a / b - 1) for _, a, b in pairs]
        widest = int(np.argmax(apart))
        sentences.append(
            f"{name.capitalize()} at {len(pairs):,} iterations that both logged: {np.mean(apart):.2%} apart "
            f"in the mean, at most {apart[widest]:.2%} (iteration {pairs[widest][0]:,}), at the last of them "
            f"{pairs[-1][1] / pairs[-1][2] - 1:+.2%} ({pairs[-1][1]:.4f}, {pairs[-1][2]:.4f})."
        )
    speed = run.median("tokens_per_second")
    baseline_speed = baseline.median("tokens_per_second")
    if speed and baseline_speed:
        sentences.append(f"{names[0]} has {speed / baseline_speed:.2f} times the tokens/s of {names[1]}.")
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _charts(runs: Sequence[RunHistory], names: Sequence[str], over: XAxis) -> Iterator[tuple[str, str]]:
    runs_with_colors = list(zip(runs, names, COLORS, strict=False))
    marks = [
        (
            place,
            f"restart of {name} at iteration {restart.iteration:,}, {restart.lost:,} steps repeated",
            color,
        )
        for run, name, color in runs_with_colors
        for restart in run.restarts
        for place in run.positions([restart.iteration], over)
    ]
    where = f" Over {_X_NAMES[over]}." + (" Dotted vertical lines are restarts." if marks else "")

    def curves_of(key: str) -> list[Curve]:
        return [Curve(name, color, *run.series(key, over)) for run, name, color in runs_with_colors]

    def chart(key: str, caption: str, curves: Sequence[Curve] | None = None, **look: bool) -> str:
        return render_chart(
            key, curves_of(key) if curves is None else curves, caption + where, marks=marks, **look
        )

    loss = "Nats per token: means between log lines, validations as points, the test as a circle."
    yield "Loss", chart("loss", loss, loss_curves(runs, names, over), log=True)
    terms = dict.fromkeys(term for run in runs for term in run.loss_terms)
    for number, term in enumerate(terms, 1):
        parts = "A part of the loss in nats: means between log lines, validations as points."
        curves = term_curves(runs, names, term, over)
        yield f"Loss: {term}", chart(f"loss-term-{number}", parts, curves, log=True)
    yield "Gradient norm", chart("grad_norm", "Before clipping.", log=True)
    yield "Learning rate", chart("learning_rate", "Of the last step before each log line.", zero=True)
    pace = "Tokens per second over all ranks, without validations and saves."
    yield "Throughput", chart("tokens_per_second", pace, zero=True)
    yield "TFLOP/s per rank", chart("tflops", "FLOPs that the model needs, without recomputation.", zero=True)
    memory = [(name, color, *run.memory(over)) for run, name, color in runs_with_colors]
    gigabytes = [Curve(name, color, xs, [y / 1e9 for y in ys]) for name, color, xs, ys in memory]
    yield "Memory", chart("memory", "GB of rank 0.", gigabytes, zero=True)
    if any(event["loss_scale"] != 1 for run in runs for event in run.train_logs):
        yield "Loss scale", chart("loss_scale", "float16's.", log=True)


def _timers_table(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    """Draw the phases as bars, in the order of the first run's."""
    timers_of_runs = [run.phases() for run in runs]
    longest = max((seconds for timers in timers_of_runs for seconds in timers.values()), default=0.0)
    if not longest:
        return "<p>No phase times: the event log was written by an earlier version.</p>"
    rows = []
    for name in dict.fromkeys(name for timers in timers_of_runs for name in timers):
        cells = ""
        for timers, color in zip(timers_of_runs, COLORS, strict=False):
            seconds = timers.get(name, 0.0)
            bar = f'style="width:{180 * seconds / longest:.1f}px;background:{color}"'
            cells += f'<td class=n>{1000 * seconds:,.2f}</td><td><span class="bar" {bar}></span></td>'
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    head = ["phase", *(cell for name in names for cell in (f"{name}, ms", ""))]
    note = "<p>Medians of rank 0. forward-backward includes reading, computing and waiting.</p>"
    return render_table(head, rows, [f"{name}, ms" for name in names]) + note


def _config_table(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    configs = [dict(_flat(run.start.get("config", {}))) for run in runs]
    if not any(configs):
        return "<p>No configuration: the event log was written by an earlier version.</p>"
    keys = list(dict.fromkeys(key for config in configs for key in config))

    def rows(shown: Sequence[str]) -> list[str]:
        return [
            f"<tr><td class=l>{escape(key)}</td>"
            + "".join(f"<td class=l>{escape(_format_value(config.get(key)))}</td>" for config in configs)
            + "</tr>"
            for key in shown
        ]

    whole = f"<details><summary>everything</summary>{render_table(('key', *names), rows(keys))}</details>"
    if len(runs) == 1:
        defaults = dict(_flat(to_dict(RunConfig())))
        given_keys = [key for key in keys if not _is_off(configs[0][key], defaults.get(key))]
        return render_table(("key", *names), rows(given_keys)) + whole
    differ = [key for key in keys if configs[0].get(key) != configs[1].get(key)]
    differences = (
        render_table(("key", *names), rows(differ)) if differ else "<p>The configurations are equal.</p>"
    )
    return f"<p>Differences:</p>{differences}{whole}"


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in config.items():
        for name, value in values.items():
            yield f"{section}.{name}", value


def _is_off(value: Any, default: Any) -> bool:
    """Whether a value is not given, or is that of a switch left at its default."""
    return value is None or (isinstance(value, bool) and value is default)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
