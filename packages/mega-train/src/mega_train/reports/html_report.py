"""The page of a run: where it stands, its curves, its configuration; beside another run if one is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_schema.app.html_page import render_page, render_table
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output, is_page
from mega_train.reports.run_history import History, Over
from mega_train.reports.run_names import is_test, name_runs
from mega_train.reports.svg_chart import Chart, Line, count

_COLORS = ("#2f6f9f", "#c2571a")  # of the run, and of the one it is compared with
_STYLE = """
svg text { font: 11px system-ui, sans-serif; fill: #59636e } .key { margin-right: 1em; color: #1f2328 }
.key span { display: inline-block; width: 14px; height: 4px; margin-right: 5px; vertical-align: middle }
.dots span { width: 8px; height: 8px; border-radius: 4px }
.mark { stroke-dasharray: 2 3; stroke-width: 2 } .at { fill: transparent } .at:hover { fill: #1f2328;
opacity: .08 } td.l { font-family: ui-monospace, monospace; font-size: 13px }
"""
_X_NAMES: Mapping[Over, str] = MappingProxyType(
    {
        "iteration": "iteration",
        "samples": "samples consumed",
        "tokens": "tokens consumed",
        "hours": "hours of training",
    }
)


def write(run: Path, against: Path | None, output: Path, over: Over = "iteration") -> None:
    """Write the page.

    Args:
        run, against: folders that were given to --save.
        over: what the curves lie over.

    Raises:
        FormatError: a folder holds no record of a run, or one without a loss.
        ConfigError: the page has no folder to lie in.
    """
    if not output.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=output.parent, hint=f"mkdir -p {output.parent}")
    check_output("--output", output, "file", is_ours=is_page)
    runs = [History.of(folder) for folder in (run, against) if folder is not None]
    with atomic_write(output) as partial:
        partial.write_text(document(runs, over), "utf-8")


def document(runs: Sequence[History], over: Over) -> str:
    """The page as HTML."""
    names = name_runs([run.folder for run in runs])
    body = [render_table(("", *names), _overview(runs), names)]
    if len(runs) == 2:
        body.append(_compared(runs[0], runs[1], names))
    for title, figure in _charts(runs, names, over):
        if figure:
            body.append(f"<h2>{escape(title)}</h2>{figure}")
    body += ["<h2>Where the time of a step goes</h2>", _phases(runs, names)]
    body += ["<h2>Configuration</h2>", _configuration(runs, names)]
    title = f"{names[0]} against {names[1]}" if len(runs) == 2 else names[0]
    return render_page(title, "".join(body), _STYLE)


def _overview(runs: Sequence[History]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        for name, value in _facts(run):
            rows.setdefault(name, [""] * len(runs))[number] = value
    return [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows.items()
    ]


def _facts(run: History) -> Iterator[tuple[str, str]]:
    """What one wants to know first, in words."""
    start, last = run.start, run.train[-1]
    if start:
        cut = " x ".join(f"{axis} {size}" for axis, size in start["layout"].items() if size > 1)
        family = f"{start['family']}, " if "family" in start else ""
        yield "model", f"{family}{start['parameters']:,} parameters"
        yield "ranks", f"{start.get('world', 1)}{f' ({cut})' if cut else ''} on {start['device']}"
        if start.get("kernels"):
            yield "kernels", start["kernels"]
    yield "iterations", f"{last['iteration']:,} of {last['iterations']:,}"
    yield "tokens", f"{run.places([last['iteration']], 'tokens')[0]:,.0f}"
    losses = [line["loss"] for line in run.train if line["loss"] is not None]
    if losses:
        yield "loss, last line of the log", f"{losses[-1]:.4f}"
    for group, scores in run.groups.items():
        yield f"{group} loss, last", f"{scores[-1]['loss']:.4f}"
        if len(scores) > 1:
            yield f"{group} loss, best", f"{min(e['loss'] for e in scores):.4f}"
        yield f"{group} perplexity, last", f"{scores[-1]['perplexity']:.2f}"
    for name, key, form in (
        ("tokens/s, median", "tokens_per_second", "{:,.0f}"),
        ("TFLOP/s a rank, median", "tflops", "{:.4g}"),
        ("MFU, median", "mfu", "{:.1%}"),
    ):
        if (value := run.middle(key)) is not None:
            yield name, form.format(value)
    held = run.memory("iteration")[1]
    if held:
        yield "memory of the first rank, most", f"{max(held) / 1e9:.2f} GB"
    yield "training", _duration(3600 * run.places([last["iteration"]], "hours")[0])
    for name, events in (("validations", run.validations), ("saves", run.saves)):
        if spent := sum(e.get("seconds", 0.0) for e in events):
            failed = sum(bool(e.get("problem")) for e in events)
            more = f", {failed} failed" if failed else ""
            yield f"{name}", f"{len(events)}, {_duration(spent)} in all{more}"
    if run.restarts:
        lost = sum(restart.lost for restart in run.restarts)
        yield "restarts", f"{len(run.restarts)}, {lost:,} steps done again"
    if skipped := sum(line["skipped"] for line in run.train):
        yield "steps that updated nothing", f"{skipped:,}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def _compared(run: History, other: History, names: Sequence[str]) -> str:
    """How far two curves of the loss lie apart, where both lines of the log stand at an iteration."""
    sentences = []
    curves = [("training loss", run.train, other.train)]
    curves += [(f"{group} loss", run.groups[group], other.groups.get(group, [])) for group in run.groups]
    for words, mine, theirs in curves:
        there = {e["iteration"]: e["loss"] for e in theirs if e["loss"] is not None}
        pairs = [(e["iteration"], e["loss"], there[e["iteration"]]) for e in mine if e["iteration"] in there]
        pairs = [pair for pair in pairs if pair[1] is not None]
        if not pairs:
            continue
        apart = [abs(a / b - 1) for _, a, b in pairs]
        widest = int(np.argmax(apart))
        sentences.append(
            f"{words.capitalize()} at {len(pairs):,} iterations that both tell: {np.mean(apart):.2%} apart "
            f"in the mean, at most {apart[widest]:.2%} (iteration {pairs[widest][0]:,}), at the last of them "
            f"{pairs[-1][1] / pairs[-1][2] - 1:+.2%} ({pairs[-1][1]:.4f}, {pairs[-1][2]:.4f})."
        )
    pace, theirs_pace = run.middle("tokens_per_second"), other.middle("tokens_per_second")
    if pace and theirs_pace:
        sentences.append(f"{names[0]} has {pace / theirs_pace:.2f} times the tokens/s of {names[1]}.")
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _charts(runs: Sequence[History], names: Sequence[str], over: Over) -> Iterator[tuple[str, str]]:
    marks = [
        (
            place,
            f"restart of {name} at iteration {restart.iteration:,}, {restart.lost:,} steps done again",
            color,
        )
        for run, name, color in zip(runs, names, _COLORS, strict=False)
        for restart in run.restarts
        for place in run.places([restart.iteration], over)
    ]
    several = list(zip(runs, names, _COLORS, strict=False))

    def chart(caption: str, lines: Sequence[Line], **look: Any) -> str:
        where = f"{caption} Over {_X_NAMES[over]}."
        if marks:
            where += " Broken vertical lines are restarts."
        return Chart(lines=lines, caption=where, x_name=_X_NAMES[over], marks=marks, **look).svg()

    def of(key: str) -> list[Line]:
        return [Line(name, color, *run.series(key, over)) for run, name, color in several]

    scored = [
        Line(f"{name}, {group}", color, *run.scores(group, over), dots=True, hollow=is_test(group))
        for run, name, color in several
        for group in run.groups
    ]
    loss = "Nats per token: means between two lines of the log, validations as points, the test as a ring."
    yield "Loss", chart(loss, [*of("loss"), *scored], log=True, shown="{:.4g}".format)
    yield "Gradient norm", chart("Before clipping.", of("gradient_norm"), log=True)
    yield (
        "Learning rate",
        chart("Of the step that a line of the log ends with.", of("rate"), zero=True, shown="{:.3g}".format),
    )
    pace = "Tokens a second of all ranks, validations and saves not counted."
    yield "Throughput", chart(pace, of("tokens_per_second"), zero=True, shown=count)
    yield "TFLOP/s a rank", chart("What the model needs, however it is computed.", of("tflops"), zero=True)
    held = [Line(name, color, *run.memory(over)) for run, name, color in several]
    gigabytes = [Line(line.name, line.color, line.xs, [y / 1e9 for y in line.ys]) for line in held]
    yield "Memory", chart("GB of the first rank.", gigabytes, zero=True, shown="{:.3g}".format)
    if any(event["loss_scale"] != 1 for run in runs for event in run.train):
        yield "Loss scale", chart("float16's.", of("loss_scale"), log=True, shown="{:.3g}".format)


def _phases(runs: Sequence[History], names: Sequence[str]) -> str:
    """Bars of the phases, in the order of the first run's."""
    found = [run.phases() for run in runs]
    longest = max((seconds for of in found for seconds in of.values()), default=0.0)
    if not longest:
        return "<p>The record does not say: it was written before phases were timed.</p>"
    rows = []
    for name in dict.fromkeys(name for of in found for name in of):
        cells = ""
        for of, color in zip(found, _COLORS, strict=False):
            seconds = of.get(name, 0.0)
            bar = f'style="width:{180 * seconds / longest:.1f}px;background:{color}"'
            cells += f'<td class=n>{1000 * seconds:,.2f}</td><td><span class="bar" {bar}></span></td>'
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    head = ["phase", *(cell for name in names for cell in (f"{name}, ms", ""))]
    note = "<p>Medians of the first rank. forward-backward holds reading, computing and waiting.</p>"
    return render_table(head, rows, [f"{name}, ms" for name in names]) + note


def _configuration(runs: Sequence[History], names: Sequence[str]) -> str:
    flat = [dict(_flat(run.start.get("config", {}))) for run in runs]
    if not any(flat):
        return "<p>The record does not say: it was written before it held the configuration.</p>"
    keys = list(dict.fromkeys(key for of in flat for key in of))

    def rows(shown: Sequence[str]) -> list[str]:
        return [
            f"<tr><td class=l>{escape(key)}</td>"
            + "".join(f"<td class=l>{escape(_value(of.get(key)))}</td>" for of in flat)
            + "</tr>"
            for key in shown
        ]

    whole = f"<details><summary>everything</summary>{render_table(('key', *names), rows(keys))}</details>"
    if len(runs) == 1:
        given = [key for key in keys if flat[0][key] not in (None, False)]
        return render_table(("key", *names), rows(given)) + whole
    differ = [key for key in keys if flat[0].get(key) != flat[1].get(key)]
    said = render_table(("key", *names), rows(differ)) if differ else "<p>The two are alike.</p>"
    return f"<p>Where they differ:</p>{said}{whole}"


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in config.items():
        for name, value in values.items():
            yield f"{section}.{name}", value


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
