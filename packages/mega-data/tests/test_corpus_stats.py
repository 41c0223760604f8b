"""Statistics equal a direct count, for any number of workers, and the page draws them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mega_data.cli import commands
from mega_data.corpus_stats.frequent_values import FrequentValues
from mega_data.corpus_stats.length_bins import EDGES, LengthBins
from mega_data.corpus_stats.stats_page import render_stats
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import IndexedWriter

TEXTS = ["one two three", "", "vier fünf", "six " * 100, "1 2 3"]
URLS = ["https://www.a.example/x", "http://B.example:80/", "https://a.example/y", None, "no address"]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, repeats in (("a", 3), ("b", 1)):
        rows = [
            {"text": text, "meta": {"url": url}, "language": text[:1], "number": len(text)}
            for text, url in zip(TEXTS * repeats, URLS * repeats, strict=True)
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with IndexedWriter(Path("data"), "uint16") as writer:
        for length in (3, 0, 5):
            if length:
                writer.add(np.arange(length))
            writer.end_document()


def stats(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["stats", *words])
    assert end.value.code == code


def read(folder: str) -> dict:
    return json.loads(Path(folder, "report.json").read_text())


@pytest.mark.usefixtures("corpus")
def test_the_report_counts_every_document():
    options = ("--url-key", "meta.url", "--count-keys", "language", "number")
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer")
    with pytest.raises(SystemExit):
        run_command(
            commands,
            ["train-tokenizer", "--input", "a.jsonl", "--vocab-size", "270", "--output", "tokenizer"],
        )
    stats("--input", "a.jsonl", "b.jsonl", "--output", "out", *options, *tokenizer)
    report = read("out")
    assert report["documents"] == 20
    characters = report["lengths"]["characters"]
    assert characters["total"] == 4 * sum(map(len, TEXTS))
    assert (characters["minimum"], characters["maximum"]) == (0, 400)
    assert report["lengths"]["bytes"]["total"] == 4 * sum(len(text.encode()) for text in TEXTS)
    assert 0 < report["lengths"]["tokens"]["total"] <= report["lengths"]["bytes"]["total"]
    assert report["frequent"]["domains"]["top"] == {"(none)": 8, "a.example": 8, "b.example": 4}
    assert report["frequent"]["language"]["top"] == {"": 4, "1": 4, "o": 4, "s": 4, "v": 4}
    assert report["frequent"]["number"]["top"]["400"] == 4
    assert [row["documents"] for row in report["inputs"]] == [15, 5]


@pytest.mark.usefixtures("corpus")
def test_workers_and_a_run_in_parts_give_the_same_report():
    words = ("--input", "a.jsonl", "b.jsonl", "--data-path", "data", "--url-key", "meta.url")
    stats(*words, "--output", "single")
    stats(*words, "--output", "two", "--workers", "2")
    stats(*words, "--output", "parts", "--stage", "count:1")
    assert not Path("parts/report.json").exists()
    stats(*words, "--output", "parts")
    for name in ("report.json", "report.html"):
        contents = {Path(folder, name).read_bytes() for folder in ("single", "two", "parts")}
        assert len(contents) == 1


@pytest.mark.usefixtures("corpus")
def test_the_documents_of_a_dataset_are_counted_from_its_index(capfd):
    stats("--data-path", "data", "--output", "out")
    tokens = read("out")["lengths"]["tokens"]
    assert (tokens["count"], tokens["total"], tokens["minimum"], tokens["maximum"]) == (3, 8, 0, 5)
    assert "tokens: 8, 2.7 a document, half have up to 3" in capfd.readouterr().out


@pytest.mark.usefixtures("corpus")
def test_languages_are_those_of_the_clean_step():
    pytest.importorskip("py3langid")
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft davon."
    english = "The quick brown fox jumps over the lazy dog and then it runs away."
    Path("c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (german, english, english)))
    stats("--input", "c.jsonl", "--output", "out", "--languages")
    assert read("out")["frequent"]["languages"]["top"] == {"en": 2, "de": 1}


@pytest.mark.usefixtures("corpus")
def test_wrong_lines_end_the_run_or_are_counted(capfd):
    Path("a.jsonl").write_text('{"text": "x"}\nwrong\n')
    stats("--input", "a.jsonl", "--output", "out", code=2)
    assert "a.jsonl:2: not JSON" in capfd.readouterr().err
    stats("--input", "a.jsonl", "--output", "out", "--on-error", "skip")
    assert "note: 1 line is not a document" in capfd.readouterr().err
    assert (read("out")["documents"], read("out")["skipped"]) == (1, 1)
    stats("--input", "a.jsonl", "--output", "new", "--on-error", "skip", "--max-errors", "0", code=2)
    assert "too many rows are wrong" in capfd.readouterr().err


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--input, --data-path: at least one is required"),
        ("--input c.jsonl", "--input: no files there: found c.jsonl"),
        ("--data-path c", "c.idx: no such file"),
        ("--data-path data --url-key url", "--url-key: reads text, and --input names none"),
        ("--input a.jsonl --vocab-size 5", "--vocab-size: has no effect without --tokenizer-type"),
        ("--input a.jsonl --tokenizer-type X", "--tokenizer-type"),
        ("--input a.jsonl --json-key body", "a.jsonl:1: no text under 'body'"),
        ("--input a.jsonl --output .", "--output: contains an input"),
    ],
)
def test_a_wrong_option_is_refused_and_no_report_is_written(words, message, capfd):
    stats("--output", "out", *words.split(), code=2)
    assert message in capfd.readouterr().err
    assert not Path("out/report.json").exists()


def test_bins_hold_each_number_and_merge():
    rng = np.random.default_rng(0)
    numbers = [0, 1, 2, 3, *map(int, 2 ** rng.uniform(0, 30, 500))]
    whole, parts = LengthBins(), [LengthBins(), LengthBins()]
    for position, number in enumerate(numbers):
        whole.add(number)
        parts[position % 2].add(number)
    assert LengthBins.sum_of([LengthBins().to_dict(), *(part.to_dict() for part in parts)]) == whole
    assert (whole.total, whole.minimum, whole.maximum) == (sum(numbers), 0, max(numbers))
    for percent in (5, 50, 95, 100):
        exact = sorted(numbers)[max(0, int(np.ceil(percent / 100 * len(numbers))) - 1)]
        assert exact <= whole.percentile(percent) <= max(exact, 1.19 * exact + 1)
    assert len(EDGES) == len(set(EDGES))


def test_frequent_values_are_exact_up_to_the_capacity_and_bounded_beyond():
    rng = np.random.default_rng(0)
    stream = [str(number) for number in rng.zipf(1.3, 20_000)]
    counts = Counter(stream)
    parts = [FrequentValues(100) for _ in range(4)]
    for position, value in enumerate(stream):
        parts[position % 4].add(value)
    summary = FrequentValues.sum_of((part.to_dict() for part in parts), 100)
    assert len(summary.counts) <= 100
    assert 0 < summary.error <= len(stream) / 100
    assert summary.total == len(stream)
    for value, count in counts.items():
        assert count - summary.error <= summary.counts[value] <= count
    exact = FrequentValues(len(counts))
    for value in stream:
        exact.add(value)
    assert (exact.counts, exact.error) == (counts, 0)


@pytest.mark.usefixtures("corpus")
def test_a_browser_draws_the_plots_without_a_request(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    stats("--input", "a.jsonl", "--output", "out", "--url-key", "meta.url")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = (tmp_path / "out/report.html").as_uri()
    process = subprocess.run(
        [browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count('<svg class="plot"') == 5
    assert "13 to 15: 3 documents" in process.stdout


def test_the_page_escapes_values_and_requests_nothing():
    hostile = "<script>alert(1)</script>"
    lengths = LengthBins()
    lengths.add(5)
    frequent = FrequentValues()
    frequent.add(hostile)
    page = render_stats(
        hostile,
        {
            "documents": 1,
            "skipped": 0,
            "lengths": {"characters": lengths.summary()},
            "frequent": {hostile: frequent.summary(5)},
            "inputs": [{"input": hostile, "documents": 1}],
        },
    )
    assert "<script" not in page
    assert "http" not in page
