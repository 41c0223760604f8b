"""The HTML report of a run: content, curves, and rendering in a browser."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_schema.errors import ConfigError, FormatError
from mega_train.cli import app, main
from mega_train.reports.html_report import render_report, write_report
from mega_train.reports.run_history import Restart, RunHistory
from mega_train.telemetry.event_log import EVENTS, EventLog
from mega_train.telemetry.events import CheckpointSaved, LogLine, TrainStart, ValidationEnd

BEGAN = TrainStart(
    iteration=0,
    iterations=100,
    consumed_samples=0,
    family="gpt",
    parameters=1234567,
    layout={"tp": 2, "pp": 1, "vp": 1, "cp": 1, "dp": 4},
    world=8,
    global_batch_size=4,
    seq_length=16,
    device="cpu",
    config={
        "optimizer": {"lr": 0.01, "clip_grad": 1.0},
        "train": {"bf16": True, "fp16": False, "exit": None},
    },
)


def line(iteration: int, loss: float | None) -> LogLine:
    return LogLine(
        iteration=iteration,
        iterations=100,
        consumed_samples=4 * iteration,
        loss=loss,
        learning_rate=1e-3,
        grad_norm=None if loss is None else 1.25,
        skipped=int(loss is None),
        loss_scale=1.0,
        iteration_seconds=0.5,
        tokens_per_second=128.0,
        seconds=0.5 * iteration,
        global_batch_size=4,
        seq_length=16,
        tflops=1.5,
        memory={"reserved": 2_500_000_000},
        timers={"forward-compute": 0.3, "optimizer": 0.1},
    )


def validation_event(iteration: int, loss: float) -> ValidationEnd:
    perplexity = math.exp(loss)
    samples = 4 * iteration
    return ValidationEnd(
        iteration=iteration, consumed_samples=samples, loss=loss, perplexity=perplexity, seconds=1.5
    )


def run_in(folder: Path, *, gain: float = 1.0, lr: float = 0.01) -> Path:
    """Write a run of 100 steps that crashed after step 60 and resumed from the checkpoint of step 40."""
    record = EventLog(folder)
    config = {**BEGAN.config, "optimizer": {"lr": lr, "clip_grad": 1.0}}
    record.on_event(replace(BEGAN, config=config))
    for i in (10, 20, 30, 40, 50, 60):
        record.on_event(line(i, gain * (4.0 - i / 50)))
        if i == 40:
            record.on_event(validation_event(40, gain * 3.5))
            record.on_event(CheckpointSaved(iteration=40, blocked_seconds=0.25))
    record = EventLog(folder)
    record.on_event(replace(BEGAN, iteration=40, consumed_samples=160, config=config))
    for i in (50, 60, 70, 80, 90, 100):
        record.on_event(line(i, None if i == 70 else gain * (4.0 - i / 50)))
    record.on_event(validation_event(100, gain * 2.5))
    record.on_event(CheckpointSaved(iteration=100, blocked_seconds=0.25))
    return folder


class PageParser(HTMLParser):
    """What a page loads, and that every element that is opened is closed and has an id of its own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(page)
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self._read(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._read(attrs)

    def _read(self, attrs: list[tuple[str, str | None]]) -> None:
        values = {name.rpartition(":")[2]: value or "" for name, value in attrs}
        self.loads += [values[name] for name in ("src", "href") if not values.get(name, "#").startswith("#")]
        self.ids += [values[name] for name in ("id",) if name in values]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def cells(page: str) -> dict[str, list[str]]:
    """Rows of tables by their first cell."""
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return {row[0]: row[1:] for row in rows if row}


def test_the_page_says_where_a_run_stands_and_where_it_restarted(tmp_path: Path) -> None:
    run = run_in(tmp_path / "small")
    page = render_report([RunHistory.load(run)], "iteration")
    figures = {name: row[0] for name, row in cells(page).items() if row}
    assert figures["model"] == "gpt, 1,234,567 parameters"
    assert figures["ranks"] == "8 (tp 2 x dp 4) on cpu"
    assert figures["iterations"] == "100 of 100"
    assert figures["tokens"] == "6,400"
    assert figures["loss, last logged"] == "2.0000"
    assert figures["validation loss, best"] == "2.5000"
    assert figures["tokens/s, median"] == "128"
    assert figures["peak memory of rank 0"] == "2.50 GB"
    assert figures["training"] == "50 s"
    assert figures["validations"] == "2, 3 s of training time"
    assert figures["checkpoints"] == "2, 0.5 s of training time"
    assert figures["restarts"] == "1, 20 steps repeated"
    assert figures["steps without an update"] == "1"
    assert figures["optimizer.lr"] == "0.01"
    assert figures["train.bf16"] == "true"
    assert page.count("restart of small at iteration 40, 20 steps repeated") == 6, "in every chart"
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        *("Loss", "Gradient norm", "Learning rate", "Throughput", "TFLOP/s per rank", "Memory"),
        *("Where the time of a step goes", "Configuration"),
    ]


def test_the_configuration_begins_with_what_is_given_and_no_switch_at_its_default(tmp_path: Path) -> None:
    switches = {"bf16": True, "fp16": False, "fp8_wgrad": False, "gradient_accumulation_fusion": True}
    record = EventLog(tmp_path)
    record.on_event(replace(BEGAN, config={"train": {**switches, "seed": 1234, "exit_interval": None}}))
    record.on_event(line(10, 3.0))
    page = render_report([RunHistory.load(tmp_path)], "iteration")
    first = page[page.index("<h2>Configuration</h2>") : page.index("<summary>everything</summary>")]
    assert re.findall(r"train\.(\w+)", first) == ["bf16", "fp8_wgrad", "seed"]


def test_a_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    write_report(run_in(tmp_path / "a"), None, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    whole = PageParser(page)
    assert whole.loads == []
    assert {"loss-1", "loss-2", "memory-1"} <= set(whole.ids)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<img", page)
    assert page.count("color-scheme: dark") == 1
    assert page.count("var(--muted)") > 50, "the ink of a chart follows the page"


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    runs = (run_in(tmp_path / "a"), run_in(tmp_path / "b", gain=1.1))
    for name in ("one.html", "two.html"):
        write_report(*runs, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_the_settings_of_a_user_of_matplotlib_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib as mpl

    run = RunHistory.load(run_in(tmp_path / "a"))
    page = render_report([run], "iteration")
    monkeypatch.setitem(mpl.rcParams, "lines.linewidth", 9.0)
    monkeypatch.setitem(mpl.rcParams, "xtick.labelsize", 30.0)
    assert render_report([run], "iteration") == page
    assert mpl.rcParams["xtick.labelsize"] == 30.0, "and ours stay ours"


def test_a_report_without_matplotlib_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = tmp_path / "report.html"
    with pytest.raises(SystemExit) as caught:
        main(["report", str(run_in(tmp_path / "a")), "--output", str(output)])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        'error: report: needs matplotlib; hint: pip install -e "packages/mega-train[plot]"\n'
    )
    assert not output.exists()


def test_help_of_the_report_does_not_import_matplotlib() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "mega_train", "report", "--help"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "matplotlib" not in process.stderr
    assert "--compare-with" in process.stdout


def test_two_runs_are_compared_where_both_have_a_line(tmp_path: Path) -> None:
    runs = [
        RunHistory.load(run_in(tmp_path / "a")),
        RunHistory.load(run_in(tmp_path / "b", gain=1.25, lr=0.02)),
    ]
    page = render_report(runs, "tokens")
    assert "<h1>a against b</h1>" in page
    assert (
        "Training loss at 9 iterations that both logged: 20.00% apart in the mean, at most 20.00% "
        "(iteration 10), at the last of them -20.00% (2.0000, 2.5000)." in page
    )
    assert "Validation loss at 2 iterations that both logged: 20.00% apart" in page
    assert "a has 1.00 times the tokens/s of b." in page
    differ = page[page.index("Differences:") : page.index("<details>")]
    assert cells(differ) == {"optimizer.lr": ["0.01", "0.02"]}


def test_runs_that_are_called_alike_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [RunHistory.load(run_in(tmp_path / folder / "run")) for folder in ("x", "y")]
    assert "<h1>x/run against y/run</h1>" in render_report(runs, "iteration")


def test_the_event_log_is_reported_once_over_every_axis(tmp_path: Path) -> None:
    run = RunHistory.load(run_in(tmp_path))
    places, losses = run.series("loss", "iteration")
    assert places == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert [x for x, y in zip(places, losses, strict=True) if math.isnan(y)] == [70], "it updated nothing"
    assert losses[0] == 3.8
    assert run.series("loss", "samples")[0] == [4 * x for x in places]
    assert run.series("loss", "tokens")[0] == [64 * x for x in places]
    assert run.series("loss", "hours")[0] == pytest.approx([x * 0.5 / 3600 for x in places])
    assert run.scores("validation", "tokens") == ([40 * 64, 100 * 64], [3.5, 2.5])
    assert run.restarts == [Restart(40, 20)]
    assert run.phases() == {"forward-compute": 0.3, "optimizer": 0.1}


def test_a_record_from_before_phases_and_configuration_makes_a_page_too(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text(
        '{"event": "train_start", "iteration": 0, "consumed_samples": 0, "parameters": 7, '
        '"layout": {"tp": 1}, "global_batch_size": 2, "seq_length": 8, "device": "cpu"}\n'
        '{"event": "train_log", "iteration": 10, "iterations": 20, "consumed_samples": 20, "loss": 2.5, '
        '"learning_rate": 0.1, "grad_norm": 1.0, "skipped": 0, "loss_scale": 1.0, "iteration_seconds": 0.5, '
        '"tokens_per_second": 32.0, "seconds": 5.0}\n'
        '{"event": "validation", "iteration": 10, "loss": 2.0, "perplexity": 7.4}\n'
    )
    page = render_report([RunHistory.load(tmp_path)], "tokens")
    figures = {name: row[0] for name, row in cells(page).items() if row}
    assert (figures["model"], figures["ranks"], figures["tokens"]) == ("7 parameters", "1 on cpu", "160")
    assert "No phase times: the event log was written" in page
    assert "No configuration: the event log was written" in page
    assert "<h2>Memory</h2>" not in page


def test_tokens_are_those_that_a_curriculum_read(tmp_path: Path) -> None:
    record = EventLog(tmp_path)
    record.on_event(BEGAN)
    for i, tokens in ((10, 100), (20, 500), (30, 1140)):
        record.on_event(replace(line(i, 3.0), consumed_tokens=tokens))
    record.on_event(validation_event(25, 3.0))
    run = RunHistory.load(tmp_path)
    assert run.series("loss", "tokens")[0] == [100, 500, 1140]
    assert run.scores("validation", "tokens")[0] == [820], "between two lines on a straight one"


def test_every_group_of_validations_is_a_curve_of_its_own(tmp_path: Path) -> None:
    record = EventLog(run_in(tmp_path))
    record.on_event(replace(validation_event(100, 2.25), split="test"))
    record.on_event(CheckpointSaved(iteration=100, blocked_seconds=0.5, error="No space left on device"))
    page = render_report([RunHistory.load(tmp_path)], "iteration")
    figures = {name: row[0] for name, row in cells(page).items() if row}
    assert (figures["validation loss, last"], figures["test loss, last"]) == ("2.5000", "2.2500")
    assert figures["checkpoints"] == "3, 1 s of training time, 1 failed"
    assert page.count('class="key dots"') == 2
    test = page[page.index("<h2>Loss") :].partition("</figure>")[0]
    assert test.count("fill: var(--page); stroke: #2f6f9f") == 1, "the test is a ring, validations are points"
    assert test.count("border:2px solid") == 1


def test_every_term_of_the_loss_is_a_chart_of_its_own(tmp_path: Path) -> None:
    record = EventLog(tmp_path)
    record.on_event(BEGAN)
    terms = {"lm loss": 3.0, "sop loss": 0.5}
    for i in (10, 20):
        record.on_event(replace(line(i, 3.5), loss_terms=terms))
    record.on_event(replace(line(30, None)))
    record.on_event(replace(validation_event(20, 3.75), loss_terms={"lm loss": 3.125, "sop loss": 0.625}))
    page = render_report([RunHistory.load(tmp_path)], "iteration")
    figures = {name: row[0] for name, row in cells(page).items() if row}
    assert (figures["lm loss, last logged"], figures["sop loss, last logged"]) == ("3.0000", "0.5000")
    assert (figures["validation lm loss, last"], figures["validation sop loss, last"]) == ("3.1250", "0.6250")
    for number, title in enumerate(("lm loss", "sop loss"), 1):
        chart = page[page.index(f"<h2>Loss: {title}</h2>") :].partition("</figure>")[0]
        assert f'id="loss-term-{number}-2"' in chart, "training and validation"


def test_words_of_a_user_are_text(tmp_path: Path) -> None:
    run = run_in(tmp_path / "<script>&$x")
    record = EventLog(run)
    words = {"data": {"path": ["<script>1"]}, "<script>2": {"<script>3": "<script>4"}}
    record.on_event(replace(BEGAN, iteration=100, device="<script>5", config=words))
    record.on_event(replace(validation_event(100, 2.0), split='<script>"6'))
    page = render_report([RunHistory.load(run)], "iteration")
    assert "<script" not in page
    assert "<title>&lt;script&gt;&amp;$x: training</title>" in page
    for number in "12345":
        assert f"&lt;script&gt;{number}" in page
    assert "&lt;script&gt;&quot;6" in page
    PageParser(page)


def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    write_report(run_in(tmp_path / "a"), run_in(tmp_path / "b", gain=1.1), tmp_path / "report.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = (tmp_path / "report.html").as_uri()
    process = subprocess.run(
        [browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    # what the browser made of it: curves are elements of a drawing, words are in place
    assert len(re.findall(r'<g id="\w+-[12]"><title>[ab]', process.stdout)) == 12
    assert "a against b" in process.stdout
    assert "apart in the mean" in process.stdout


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "contains no event log of a run: wanted events.jsonl"),
        (
            lambda folder: EventLog(folder).on_event(BEGAN),
            "contains no loss yet: wanted a run that reached its first --log-interval",
        ),
    ],
)
def test_a_folder_without_a_run_is_refused_and_nothing_is_written(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(tmp_path / "run")
    with pytest.raises(FormatError) as caught:
        write_report(tmp_path / "run", None, tmp_path / "report.html")
    assert str(caught.value) == f"{tmp_path / 'run'}: {words}"
    assert not (tmp_path / "report.html").exists()


def test_a_page_without_a_folder_to_lie_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_report(run_in(tmp_path / "a"), None, tmp_path / "none" / "report.html")
    where = tmp_path / "none"
    assert str(caught.value) == f"--output: no such folder: found {where}; hint: mkdir -p {where}"


def test_the_command_says_where_the_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_in(tmp_path / "a")
    run_in(tmp_path / "b")
    result = CliRunner().invoke(app, ["report", "a", "--compare-with", "b", "--x-axis", "hours"])
    assert (result.exit_code, result.output) == (0, "report.html\n")
    assert "Over hours of training." in (tmp_path / "report.html").read_text("utf-8")
