"""A mix of JSON lines holds each line in one split, as often as its weight requires, byte for byte."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from mega_data.cli import commands
from mega_data.mix.text_mix import TextMix, find_text_sources
from mega_data.task_stages import run_task
from mega_schema.app.cli_runner import run_command

SPLITS = ("train", "valid", "test")


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write 300 lines in two files of the folder `a`, one without a last line break, and 80 in b.jsonl.gz."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    lines = [json.dumps({"text": f"a {number} " + "x" * (number % 40)}) for number in range(300)]
    Path("a/1.jsonl").write_text("\n".join(lines[:120]))
    Path("a/2.jsonl").write_text("\n\n".join(lines[120:]) + "\n")
    texts = "".join(json.dumps({"text": f"b {number} é", "id": number}) + "\n" for number in range(80))
    Path("b.jsonl.gz").write_bytes(gzip.compress(texts.encode()))


def mix(output: str, *words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["mix", "--output", output, *words])
    assert end.value.code == code


def lines_of(folder: str, split: str) -> list[bytes]:
    return b"".join(path.read_bytes() for path in sorted(Path(folder).glob(f"{split}-*"))).splitlines()


def source_lines() -> list[bytes]:
    content = Path("a/1.jsonl").read_bytes() + b"\n" + Path("a/2.jsonl").read_bytes()
    content += gzip.decompress(Path("b.jsonl.gz").read_bytes())
    return [line for line in content.splitlines() if line]


def test_without_weights_each_line_is_in_exactly_one_split():
    mix("out", "--input", "a", "b.jsonl.gz", "--split", "80,15,5")
    parts = {name: lines_of("out", name) for name in SPLITS}
    assert Counter(sum(parts.values(), [])) == Counter(source_lines())
    assert len(parts["train"]) / 380 == pytest.approx(0.8, abs=0.06)
    order = [json.loads(line)["text"][0] for line in parts["train"]]
    assert len(set(order[:40])) == 2
    rows = json.loads(Path("out/report.json").read_text())["splits"]
    assert [row["documents"] for row in rows["train"]] == [order.count("a"), order.count("b")]
    assert sum(row["bytes"] for row in rows["train"]) == sum(len(line) + 1 for line in parts["train"])


def test_weights_are_shares_of_the_bytes(capfd):
    mix("out", "--input", "0.5", "a", "0.5", "b.jsonl.gz", "--split", "1")
    counts = Counter(lines_of("out", "train"))
    from_b = {counts[line] for line in source_lines() if b'"b ' in line}
    assert max(from_b) - min(from_b) == 1
    rows = json.loads(Path("out/report.json").read_text())["splits"]["train"]
    assert [row["share"] for row in rows] == [pytest.approx(0.5, abs=0.07)] * 2
    captured = capfd.readouterr()
    assert "bytes" in captured.out.splitlines()[0]
    assert "note: valid: no document" in captured.err


def test_the_order_does_not_depend_on_memory_or_workers():
    mix("single", "--input", "a", "b.jsonl.gz")
    mix("two", "--input", "a", "b.jsonl.gz", "--workers", "2")
    mix("parts", "--input", "a", "b.jsonl.gz", "--stage", "count")
    mix("parts", "--input", "a", "b.jsonl.gz", "--stage", "sort:1")
    mix("parts", "--input", "a", "b.jsonl.gz")
    both_sources = find_text_sources(("a", "b.jsonl.gz"))
    small = TextMix(both_sources, (0.969, 0.03, 0.001), 1234, Path("small"), Path("w"), 9000)
    small.begin()
    for stage in small.stages():
        for task in range(stage.tasks):
            run_task(stage, task, small.work)
    assert len(list(Path("small").glob("train-*"))) > 3
    for split in SPLITS:
        expected = lines_of("single", split)
        assert all(lines_of(folder, split) == expected for folder in ("two", "parts", "small"))
    mix("seed", "--input", "a", "b.jsonl.gz", "--seed", "5")
    assert lines_of("seed", "train") != lines_of("single", "train")


def test_files_of_an_earlier_mix_are_removed():
    mix("out", "--input", "a")
    assert Path("out/valid-00000.jsonl").exists()
    mix("out", "--input", "b.jsonl.gz", "--split", "1")
    assert {path.name for path in Path("out").glob("*.jsonl")} == {"train-00000.jsonl"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--data-path, --input: exactly one is required: found neither"),
        ("--input a --data-path x", "--data-path, --input: exactly one is required: found both"),
        ("--input 0.3 a b.jsonl.gz", "--input: weights and prefixes do not alternate"),
        ("--input 0 a 1 b.jsonl.gz", "--input: not a weight: found 0 a"),
        ("--input a a/1.jsonl", "--input: names a file twice: found a/1.jsonl"),
        ("--input c.jsonl", "--input: no files there: found c.jsonl"),
        ("--input a --weights-only", "--weights-only: is of datasets"),
        ("--input a --tokens 5", "--tokens: is of datasets"),
        ("--input a --output a/out", "is in a folder that --input reads"),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_written(words, message, capfd):
    mix("out", *words.split(), code=2)
    assert message in capfd.readouterr().err
    assert not Path("out").exists()
    assert not Path("a/out").exists()
