"""Repeated spans of sentences are removed as in the reference, and one occurrence of each is kept."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.clean import sentence_dedup
from mega_data.clean.sentence_dedup import (
    RUN_SPANS,
    SentenceDedupStep,
    open_run_writer,
    read_runs,
    span_keys,
    split_sentences,
)
from mega_data.cli import commands
from mega_data.jsonl_shards import output_name

STEP = "spans"


def corpus(folder: Path, texts: list[str], files: int) -> Path:
    folder.mkdir()
    for number in range(files):
        rows = [
            json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts) if n % files == number
        ]
        (folder / f"{number}.jsonl").write_text("".join(rows))
    return folder


def clean(*arguments: object) -> str:
    outcome = CliRunner().invoke(commands, ["clean", *map(str, arguments)])
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    return outcome.stdout


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        file.name: [json.loads(line) for line in file.read_bytes().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def random_texts(seed: int, count: int = 60) -> list[str]:
    """Texts of a few different sentences, so that spans are repeated within a text and between texts."""
    rng = random.Random(seed)
    pool = [f"Sentence {letter} says it{end}" for letter in "abcd" for end in (". ", "!\n", "? ")]
    return ["".join(rng.choices(pool, k=rng.randint(0, 9))).strip() for _ in range(count)]


def dedup_reference(texts: list[str], size: int, fewest: int) -> list[str | None]:
    """The rule, with a dictionary of the spans seen."""
    cut = [split_sentences(text) for text in texts]
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for number, pieces in enumerate(cut):
        plain = [" ".join(piece.lower().split()) for piece in pieces]
        for position in range(len(plain) - size + 1):
            places.setdefault(tuple(plain[position : position + size]), []).append((number, position))
    goes = [[False] * len(pieces) for pieces in cut]
    repeated = [occurrences for occurrences in places.values() if len(occurrences) > 1]
    for number, position in (place for occurrences in repeated for place in occurrences[1:]):
        goes[number][position : position + size] = [True] * size
    for number, position in (occurrences[0] for occurrences in repeated):
        goes[number][position : position + size] = [False] * size
    results = list[str | None]()
    for text, pieces, is_cut in zip(texts, cut, goes, strict=True):
        stay = [piece for piece, g in zip(pieces, is_cut, strict=True) if not g]
        enough = len(stay) >= max(1, fewest)
        results.append(text if not any(is_cut) else "".join(stay).strip() if enough else None)
    return results


@pytest.mark.parametrize("seed", range(6))
def test_spans_are_cut_as_counting_them_one_by_one_cuts_them(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, fewest = [(3, 3), (2, 0), (1, 1)][seed % 3]
    for name, value in (("RUN_SPANS", 7), ("RANGE_BYTES", 900)):  # several runs, ranges and parts of ranges
        monkeypatch.setattr(sentence_dedup, name, value)
    texts = random_texts(seed)
    folder = corpus(tmp_path / "in", texts, 3)
    flags = ["--input", folder, "--output", tmp_path / "out", "--memory", 1]
    monkeypatch.setattr(sentence_dedup, "BYTES_PER_SPAN", 1 << 16)
    clean(*flags, "--step", f"spans:sentences={size},fewest={fewest}")
    ordered = [n for file in range(3) for n in range(file, len(texts), 3)]  # shards by name, then lines
    expected = dedup_reference([texts[n] for n in ordered], size, fewest)
    wanted = [(n, text) for n, text in zip(ordered, expected, strict=True) if text is not None]
    assert [(row["id"], row["text"]) for rows in read(tmp_path / "out").values() for row in rows] == wanted
    assert [text for _, text in wanted] != [texts[n] for n, _ in wanted]


def test_every_span_of_the_corpus_that_is_repeated_stays_once(tmp_path: Path) -> None:
    texts = random_texts(9, 200)
    clean(
        "--input", corpus(tmp_path / "in", texts, 2), "--output", tmp_path / "out", "--step", "spans:fewest=1"
    )

    def repeated_keys(texts: list[str]) -> list[int]:
        return [key for text in texts for key in span_keys(split_sentences(text), 3).tolist()]

    before = repeated_keys(texts)
    after = repeated_keys([row["text"] for rows in read(tmp_path / "out").values() for row in rows])
    repeated = {key for key in before if before.count(key) > 1}
    assert len(repeated) > 20
    assert repeated <= set(after)
    assert sum(after.count(key) > 1 for key in repeated) < 0.2 * len(repeated)


def test_the_same_bytes_come_out_whatever_the_workers_and_the_order_of_files(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", random_texts(4), 4)
    files = sorted(folder.iterdir())
    steps = [
        "--step",
        "length:minimum=30",
        "--step",
        "spans",
        "--step",
        "length:minimum=60",
        "--keep-dropped",
    ]
    clean("--input", *files, "--output", tmp_path / "one", *steps)
    clean("--input", *files[::-1], "--output", tmp_path / "two", *steps, "--workers", 2)
    names = {str(f.relative_to(tmp_path / "one")) for f in (tmp_path / "one").rglob("*") if f.is_file()}
    assert "dropped/01-spans/0.jsonl" in names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_one_task_at_a_time_as_in_a_job_array_gives_the_same(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", random_texts(2), 2)
    clean("--input", folder, "--output", tmp_path / "one", "--step", "spans")
    parts = ["--input", folder, "--output", tmp_path / "two", "--step", "spans", "--work-dir", tmp_path / "w"]
    for only in (
        "plan",
        *(f"00-spans/{task}" for task in ("spans:1", "spans:0", "repeats", "cut:1", "cut:0")),
    ):
        clean(*parts, "--stage", only)
    clean(*parts)  # all is done: the files get their names
    assert read(tmp_path / "one") == read(tmp_path / "two")


def test_what_goes_is_counted_and_kept_and_an_unchanged_line_keeps_its_bytes(tmp_path: Path) -> None:
    span = "One is here. Two is there. Three is nowhere."
    lines = [
        b'{"text":  "' + span.encode() + b'", "n": 1.0}\r\n',
        b'{"text": "' + span.upper().encode() + b'"}\n',
        b"{\n",
        b'{"text": "New it is. ' + span.encode() + b' And more. And more still."}\n',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    output = clean(
        "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--step", "spans", "--keep-dropped",
        "--on-error", "skip",
    )  # fmt: skip
    written = (tmp_path / "out/a.jsonl").read_bytes().splitlines()
    assert written == [lines[0].rstrip(), b'{"text":"New it is. And more. And more still."}']
    assert read(tmp_path / "out/dropped/00-spans")["a.jsonl"] == [
        {"text": span.upper(), "dropped": "spans: fewer than 3 sentences left"}
    ]
    (step,) = json.loads((tmp_path / "out/report.json").read_bytes())["steps"]
    assert (step["documents_in"], step["documents_out"], step["changed"]) == (3, 2, 1)
    assert "spans: 2 of 3 documents\n  1  fewer than 3 sentences left" in output
    assert read(tmp_path / "out/quarantine/00-spans")["a.jsonl"][0]["line"] == 3


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("no end", ["no end"]),
        ("It costs 3.50. Really?! Yes", ["It costs 3.50. ", "Really?! ", "Yes"]),
        ('He said "no." She left.', ['He said "no." ', "She left."]),
        ("A title\n\nA text. ", ["A title\n\n", "A text. "]),
        ("我们都是学生。你呢？好", ["我们都是学生。", "你呢？", "好"]),
    ],
)
def test_sentences_are_the_text_again(text: str, wanted: list[str]) -> None:
    assert split_sentences(text) == wanted
    assert "".join(wanted) == text


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 50])
def test_runs_give_every_key_once_with_its_place(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RUN_SPANS > 7
    monkeypatch.setattr(sentence_dedup, "RUN_SPANS", 7)
    rng = np.random.default_rng(count)
    keys, places = rng.integers(0, 2**64, count, dtype=np.uint64), np.arange(count, dtype=np.uint64)
    with open_run_writer(tmp_path / "runs") as put:
        for start in range(0, count, 5):
            put(keys[start : start + 5], places[start : start + 5])
    edges = [0, 1 << 61, 5 << 61, 1 << 64]
    pairs = [
        (int(key), int(place))
        for low, high in zip(edges, edges[1:], strict=False)
        for ks, ps in read_runs(tmp_path / "runs", low, high)
        for key, place in zip(ks, ps, strict=True)
        if low <= key < high
    ]
    assert sorted(pairs) == sorted(zip(keys.tolist(), places.tolist(), strict=True))


def test_a_span_of_no_sentences_is_a_mistake(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", ["x"], 1)
    words = [
        "clean",
        "--input",
        str(folder),
        "--output",
        str(tmp_path / "out"),
        "--step",
        "spans:sentences=0",
    ]
    outcome = CliRunner().invoke(commands, words)
    assert (
        str(outcome.exception)
        == "step spans: sentences: not a number of sentences: found 0, wanted 1 or more"
    )


MEMORY = """
import resource, sys
from pathlib import Path
from mega_data.clean.sentence_dedup import SentenceDedup, SentenceDedupStep
from mega_data.task_stages import run_task
from mega_data.range_outputs import RangeOutputs
from mega_data.readers.ranges import whole_files
work, path = Path(sys.argv[1]), Path(sys.argv[2])
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
step = SentenceDedupStep()
outputs = RangeOutputs(whole_files([path]), work / "out", work / "parts")
job = SentenceDedup(work, outputs, "spans", step, "text", 4 << 20)
spans, repeats, _ = job.stages()
run_task(spans, 0, work)
before = peak()
run_task(repeats, 0, work)
print(peak() - before)
"""


def test_sorting_takes_the_memory_allowed_and_not_the_corpus(tmp_path: Path) -> None:
    text = "".join(f"It is {n}. " for n in range(20_000))
    with (tmp_path / "a.jsonl").open("w") as out:
        for n in range(40):  # 800,000 spans, 50 MB if they were sorted at once
            out.write(json.dumps({"text": text.replace("is", f"is{n % 30}")}) + "\n")
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "w"), str(tmp_path / "a.jsonl")]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert int(process.stdout) < 24 << 20
    assert output_name(tmp_path / "a.jsonl") == "a.jsonl"
    shutil.rmtree(tmp_path / "w")
    assert SentenceDedupStep().sentences == 3
