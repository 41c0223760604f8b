"""The page of a run: what stands in it, how its curves are drawn, and that a browser shows it."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_schema.errors import ConfigError, FormatError
from mega_train.cli import app
from mega_train.reports.html_report import render_report, write_report
from mega_train.reports.run_history import Restart, RunHistory
from mega_train.reports.svg_chart import Chart, Curve, format_count
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
    config={"optimizer": {"lr": 0.01, "clip": 1.0}, "train": {"bf16": True, "fp16": False, "exit": None}},
)


def line(iteration: int, loss: float | None) -> LogLine:
    return LogLine(
        iteration=iteration,
        iterations=100,
        consumed_samples=4 * iteration,
        loss=loss,
        rate=1e-3,
        gradient_norm=None if loss is None else 1.25,
        skipped=int(loss is None),
        loss_scale=1.0,
        step_seconds=0.5,
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
    """100 steps; the process crashed after step 60 and went on from the checkpoint of step 40."""
    record = EventLog(folder)
    config = {**BEGAN.config, "optimizer": {"lr": lr, "clip": 1.0}}
    record.on_event(replace(BEGAN, config=config))
    for i in (10, 20, 30, 40, 50, 60):
        record.on_event(line(i, gain * (4.0 - i / 50)))
        if i == 40:
            record.on_event(validation_event(40, gain * 3.5))
            record.on_event(CheckpointSaved(iteration=40, seconds=0.25))
    record = EventLog(folder)
    record.on_event(replace(BEGAN, iteration=40, consumed_samples=160, config=config))
    for i in (50, 60, 70, 80, 90, 100):
        record.on_event(line(i, None if i == 70 else gain * (4.0 - i / 50)))
    record.on_event(validation_event(100, gain * 2.5))
    record.on_event(CheckpointSaved(iteration=100, seconds=0.25))
    return folder


class PageParser(HTMLParser):
    """What a page loads, and that every element that is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

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
    assert figures["loss, last line of the log"] == "2.0000"
    assert figures["validation loss, best"] == "2.5000"
    assert figures["tokens/s, median"] == "128"
    assert figures["memory of the first rank, most"] == "2.50 GB"
    assert figures["training"] == "50 s"
    assert figures["validations"] == "2, 3 s in all"
    assert figures["saves"] == "2, 0.5 s in all"
    assert figures["restarts"] == "1, 20 steps done again"
    assert figures["steps that updated nothing"] == "1"
    assert figures["optimizer.lr"] == "0.01"
    assert figures["train.bf16"] == "true"
    assert page.count("restart of small at iteration 40, 20 steps done again") == 6, "in every chart"
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        *("Loss", "Gradient norm", "Learning rate", "Throughput", "TFLOP/s a rank", "Memory"),
        *("Where the time of a step goes", "Configuration"),
    ]


def test_a_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    write_report(run_in(tmp_path / "a"), None, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert PageParser(page).loads == []
    assert not re.search(r"url\(|@import|<script|<link|<img", page)


def test_two_runs_are_compared_where_both_have_a_line(tmp_path: Path) -> None:
    runs = [
        RunHistory.load(run_in(tmp_path / "a")),
        RunHistory.load(run_in(tmp_path / "b", gain=1.25, lr=0.02)),
    ]
    page = render_report(runs, "tokens")
    assert "<h1>a against b</h1>" in page
    assert (
        "Training loss at 9 iterations that both tell: 20.00% apart in the mean, at most 20.00% "
        "(iteration 10), at the last of them -20.00% (2.0000, 2.5000)." in page
    )
    assert "Validation loss at 2 iterations that both tell: 20.00% apart" in page
    assert "a has 1.00 times the tokens/s of b." in page
    differ = page[page.index("Where they differ:") : page.index("<details>")]
    assert cells(differ) == {"optimizer.lr": ["0.01", "0.02"]}


def test_runs_that_are_called_alike_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [RunHistory.load(run_in(tmp_path / folder / "run")) for folder in ("x", "y")]
    assert "<h1>x/run against y/run</h1>" in render_report(runs, "iteration")


def test_the_record_is_told_once_over_every_axis(tmp_path: Path) -> None:
    run = RunHistory.load(run_in(tmp_path))
    places, losses = run.series("loss", "iteration")
    assert places == [10, 20, 30, 40, 50, 60, 80, 90, 100], "a step without a loss has no point"
    assert losses[0] == 3.8
    assert run.series("loss", "samples")[0] == [4 * x for x in places]
    assert run.series("loss", "tokens")[0] == [64 * x for x in places]
    assert run.series("loss", "hours")[0] == pytest.approx([x * 0.5 / 3600 for x in places])
    assert run.scores("validation", "tokens") == ([40 * 64, 100 * 64], [3.5, 2.5])
    assert run.restarts == [Restart(40, 20)]
    assert run.phases() == {"forward-compute": 0.3, "optimizer": 0.1}


def test_a_record_from_before_phases_and_configuration_makes_a_page_too(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text(
        '{"event": "start", "iteration": 0, "consumed_samples": 0, "parameters": 7, "layout": {"tp": 1}, '
        '"global_batch_size": 2, "seq_length": 8, "device": "cpu"}\n'
        '{"event": "train", "iteration": 10, "iterations": 20, "consumed_samples": 20, "loss": 2.5, '
        '"rate": 0.1, "gradient_norm": 1.0, "skipped": 0, "loss_scale": 1.0, "step_seconds": 0.5, '
        '"tokens_per_second": 32.0, "seconds": 5.0}\n'
        '{"event": "validation", "iteration": 10, "loss": 2.0, "perplexity": 7.4}\n'
    )
    page = render_report([RunHistory.load(tmp_path)], "tokens")
    figures = {name: row[0] for name, row in cells(page).items() if row}
    assert (figures["model"], figures["ranks"], figures["tokens"]) == ("7 parameters", "1 on cpu", "160")
    assert "was written before phases were timed" in page
    assert "was written before it held the configuration" in page
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
    record.on_event(replace(validation_event(100, 2.25), of="test"))
    record.on_event(CheckpointSaved(iteration=100, seconds=0.5, problem="No space left on device"))
    page = render_report([RunHistory.load(tmp_path)], "iteration")
    figures = {name: row[0] for name, row in cells(page).items() if row}
    assert (figures["validation loss, last"], figures["test loss, last"]) == ("2.5000", "2.2500")
    assert figures["saves"] == "3, 1 s in all, 1 failed"
    assert page.count('class="key dots"') == 2
    test = page[page.index("<h2>Loss") :].partition("</figure>")[0]
    assert test.count('fill="#fff" stroke=') == 1, "the test is a ring, validations are points"
    assert test.count("border:2px solid") == 1


def test_names_of_folders_are_text(tmp_path: Path) -> None:
    page = render_report([RunHistory.load(run_in(tmp_path / "<b>&"))], "iteration")
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page
    PageParser(page)


def _chart(ys: list[float], **look: bool) -> str:
    xs = [float(x) for x in range(1, len(ys) + 1)]
    return Chart(lines=[Curve("a", "#000", xs, ys)], x_name="x", caption="c", **look).svg()


def _places(svg: str) -> list[tuple[float, float]]:
    points = re.search(r'<polyline points="([^"]*)"', svg)
    assert points is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points[1].split())]


def test_a_line_goes_up_where_values_do() -> None:
    ys = [y for _, y in _places(_chart([1.0, 2.0, 4.0]))]
    assert ys[0] > ys[1] > ys[2]
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 2, abs=0.2)
    ys = [y for _, y in _places(_chart([1.0, 10.0, 100.0], log=True))]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2), "a decade is a decade"


def test_a_value_of_zero_keeps_a_chart_from_a_logarithmic_axis() -> None:
    assert len(_places(_chart([0.0, 10.0, 100.0], log=True))) == 3


@pytest.mark.parametrize("ys", [[2.5], [0.0], [3.0, 3.0], [-1.0, -1.0], [1e-9, 1e9], [5e-324, 1.0]])
def test_values_that_hardly_make_an_axis_are_drawn(ys: list[float]) -> None:
    for look in ({}, {"zero": True}, {"log": True}):
        places = _places(_chart(ys, **look))
        assert all(math.isfinite(x) and math.isfinite(y) for x, y in places)


def test_many_points_become_means_in_a_band_that_keeps_what_stood_out() -> None:
    ys = [1.0] * 4000
    ys[2000] = 9.0
    svg = _chart(ys)
    assert len(_places(svg)) == 400
    band = re.search(r'<polygon points="([^"]*)"', svg)
    assert band is not None
    tops = [float(pair.split(",")[1]) for pair in band[1].split()]
    assert min(tops) < 30, "the one value reaches the top"
    assert len(svg) < 50_000


def test_nothing_to_draw_is_no_chart() -> None:
    assert Chart(lines=[Curve("a", "#000", [], [])], x_name="x", caption="c").svg() == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (950, "950"), (12500, "12.5k"), (2e6, "2M"), (3.25e9, "3.25G"), (1e13, "10T")],
)
def test_large_numbers_are_short(value: float, words: str) -> None:
    assert format_count(value) == words


def test_a_pointer_reads_the_values_below_it() -> None:
    titles = re.findall(r"<title>([^<]*)</title>", _chart([1.5, 2.5, 3.5]))
    assert titles == ["x 1\na: 1.5", "x 2\na: 2.5", "x 3\na: 3.5"]


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
    # what the browser made of it: lines are elements of a drawing, words are in place
    assert process.stdout.count("<polyline") >= 12
    assert "a against b" in process.stdout
    assert "apart in the mean" in process.stdout


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "holds no record of a run: wanted events.jsonl"),
        (
            lambda folder: EventLog(folder).on_event(BEGAN),
            "holds no loss yet: wanted a run that reached its first --log-interval",
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
    result = CliRunner().invoke(app, ["report", "a", "--against", "b", "--over", "hours"])
    assert (result.exit_code, result.output) == (0, "report.html\n")
    assert "Over hours of training." in (tmp_path / "report.html").read_text("utf-8")
