"""Repeated spans of tokens are removed as comparing all spans with all earlier ones removes them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.dedup import key_runs, span_tokens, substrings
from mega_data.dedup.key_runs import SortedRows, list_runs, open_run_writer, read_sorted
from mega_data.dedup.span_tokens import Tokenization, Unit, find_anchors, span_hashes
from mega_data.dedup.substrings import find_later_spans
from mega_data.jsonl_shards import read_lines
from tests.selection import every_nth
from tests.shared_data import SHARED, needs_shared

Corpus = list[list[str]]  # texts by shard
WIDE = "的一\U0001f600"  # each is a token of its own


def write_corpus(folder: Path, corpus: Corpus) -> Path:
    folder.mkdir()
    for shard, texts in enumerate(corpus):
        rows = [json.dumps({"id": f"{shard}.{row}", "text": text}) + "\n" for row, text in enumerate(texts)]
        (folder / f"{shard}.jsonl").write_text("".join(rows))
    return folder


def dedup(*arguments: object) -> str:
    words = ["dedup", "--preset", "substrings", *map(str, arguments)]
    outcome = CliRunner().invoke(commands, words)
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    return outcome.stdout


def read(folder: Path) -> list[list[dict[str, Any]]]:
    return [
        [json.loads(row) for row in file.read_bytes().splitlines()] for file in sorted(folder.glob("*.jsonl"))
    ]


def tokens_of(text: str, unit: Unit) -> list[tuple[str, int]]:
    """Cut a text character by character: each token and its place."""
    if unit == "characters":
        return [(character, place) for place, character in enumerate(text)]
    tokens: list[tuple[str, int]] = []
    is_open = False
    for place, character in enumerate(text):
        is_word = unicodedata.category(character)[0] in "LMN" and character not in WIDE
        if is_word and is_open:
            tokens[-1] = (tokens[-1][0] + character, tokens[-1][1])
        elif not character.isspace():
            tokens.append((character, place))
        is_open = is_word
    return tokens


def remaining_texts(corpus: Corpus, unit: Unit, span: int) -> list[list[str | None]]:
    """Compare every span of the corpus with every equal one before it."""
    places: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}  # of each span: shard, text, token
    results: list[list[str | None]] = []
    for shard, texts in enumerate(corpus):
        results.append([])
        for row, text in enumerate(texts):
            tokens = tokens_of(text, unit)
            words = [word for word, _ in tokens]
            stays = [True] * len(tokens)
            for start in range(len(tokens) - span + 1):
                earlier = places.setdefault(tuple(words[start : start + span]), [])
                if any((shard, row) != place[:2] or place[2] + span <= start for place in earlier):
                    stays[start : start + span] = [False] * span
                earlier.append((shard, row, start))
            bounds = [place for _, place in tokens] + [len(text)]
            remaining = text[: bounds[0]] + "".join(
                text[bounds[n] : bounds[n + 1]] for n, stay in enumerate(stays) if stay
            )
            if unit == "words" and tokens and not stays[-1]:
                remaining = remaining.rstrip()
            results[-1].append(remaining if any(stays) or not tokens else None)
    return results


def random_corpus(rng: random.Random, *, words: Sequence[str], shards: int = 3, longest: int = 40) -> Corpus:
    """Texts of few different words, some with parts of others and with runs of one word."""
    corpus: Corpus = []
    texts: list[str] = []
    for _ in range(shards):
        for _ in range(rng.randint(0, 8)):
            parts = ["".join(rng.choices(words, k=rng.randint(0, longest)))]
            if texts and rng.random() < 0.6:
                source = rng.choice(texts)
                start = rng.randint(0, len(source))
                parts.append(source[start : start + rng.randint(0, 120)])
            if rng.random() < 0.2:
                parts.append("".join(rng.choices(words, k=rng.randint(1, 3))) * rng.randint(2, 20))
            rng.shuffle(parts)
            texts.append("".join(parts))
        corpus.append(texts[sum(map(len, corpus)) :])
    return corpus


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small corpora have several ranges, runs, parts of ranges, blocks of flags and pieces of texts."""
    monkeypatch.setattr(substrings, "RANGE_BYTES", 1500)
    monkeypatch.setattr(key_runs, "BYTES_PER_ROW", 1 << 14)
    monkeypatch.setattr(Tokenization.blocks, "__defaults__", (16,))


@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize("seed", every_nth(13, range(130)))
def test_spans_are_removed_as_comparing_all_pairs_removes_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    unit: Unit = ("words", "characters")[seed % 2]
    span = (2, 3, 5, 8, 13, 21)[seed % 6]
    words = [*("a ", "be, ", "é\n", "ab-", "7 "), *WIDE][: 3 + seed % 6]
    corpus = random_corpus(rng, words=words)
    expected = remaining_texts(corpus, unit, span)
    folder = write_corpus(tmp_path / "in", corpus)
    flags = ["--input", folder, "--output", tmp_path / "out", "--memory", 1]
    dedup(*flags, "--unit", unit, "--min-tokens", span)
    assert [[row["text"] for row in shard] for shard in read(tmp_path / "out")] == [
        [text for text in texts if text is not None] for texts in expected
    ]


@pytest.mark.parametrize("unit", ["words", "characters"])
def test_spans_of_code_are_removed_as_comparing_all_of_them_removes_them(tmp_path: Path, unit: Unit) -> None:
    text = Path(span_tokens.__file__).read_text() + Path(substrings.__file__).read_text()
    rng = random.Random(3)
    texts = []
    for _ in range(60):  # parts of one text overlap
        start = rng.randrange(len(text))
        texts.append(text[start : start + rng.randrange(3000)])
    corpus = [texts[:20], texts[20:21], texts[21:]]
    expected = remaining_texts(corpus, unit, 50)
    printed = dedup(
        "--input", write_corpus(tmp_path / "in", corpus), "--output", tmp_path / "out", "--unit", unit
    )
    rows = read(tmp_path / "out")
    assert [[row["text"] for row in shard] for shard in rows] == [
        [text for text in texts if text is not None] for texts in expected
    ]
    assert sum(map(len, rows)) < 60
    assert f"kept {sum(map(len, rows))} of 60 documents" in printed


@needs_shared
@pytest.mark.parametrize(
    "name", ["web/cc_en_head-0091.jsonl.gz", "multilingual.jsonl.zst", "turkish.jsonl.zst"]
)
def test_spans_of_real_text_are_removed_as_comparing_all_of_them_removes_them(
    tmp_path: Path, name: str
) -> None:
    lines = islice(read_lines(SHARED / "data/corpora" / name), 150)
    texts = [json.loads(line)["text"][:4000] for line in lines]
    texts += [text[len(text) // 3 :] + text[: len(text) // 4] for text in texts[::3]]
    corpus = [texts[::2], texts[1::2]]
    folder = write_corpus(tmp_path / "in", corpus)
    dedup("--input", folder, "--output", tmp_path / "out", "--min-tokens", 20)
    expected = [
        [text for text in texts if text is not None] for texts in remaining_texts(corpus, "words", 20)
    ]
    assert [[row["text"] for row in shard] for shard in read(tmp_path / "out")] == expected
    assert sum(map(len, map("".join, expected))) < 0.9 * sum(map(len, texts))


def test_the_same_bytes_come_out_whatever_the_workers_and_the_order_of_files(tmp_path: Path) -> None:
    corpus = random_corpus(random.Random(5), words=["a ", "b ", "c "], shards=4)
    files = sorted(write_corpus(tmp_path / "in", corpus).iterdir())
    flags = ["--keep-dropped", "--id-key", "id", "--min-tokens", 6]
    dedup("--input", *files, "--output", tmp_path / "one", *flags)
    dedup("--input", *files[::-1], "--output", tmp_path / "two", *flags, "--workers", 2)
    names = {file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*.jsonl")}
    assert len(names) == 8
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_run_resumes_after_its_finished_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = random_corpus(random.Random(6), words=["a ", "b ", "c "], shards=2)
    folder = write_corpus(tmp_path / "in", corpus)
    dedup("--input", folder, "--output", tmp_path / "one", "--min-tokens", 6)
    flags = [
        "--input",
        folder,
        "--output",
        tmp_path / "two",
        "--work-dir",
        tmp_path / "work",
        "--min-tokens",
        6,
    ]
    for stage in ("plan", "anchors:1", "anchors:0", "repeats", "spans", "later", "cut:1"):
        dedup(*flags, "--stage", stage)
    for name in ("anchors", "repeats", "spans", "later"):
        monkeypatch.setattr(substrings.SubstringDedup, name, None)  # none of these tasks runs again
    dedup(*flags)
    assert read(tmp_path / "one") == read(tmp_path / "two")


def test_the_record_has_every_removed_span_with_its_place_and_the_first_occurrence(tmp_path: Path) -> None:
    corpus = random_corpus(random.Random(7), words=["a ", "b ", "c "], shards=3)
    flags = ["--input", write_corpus(tmp_path / "in", corpus), "--keep-dropped", "--min-tokens", 6]
    printed = dedup(*flags, "--output", tmp_path / "out")
    records = read(tmp_path / "out/dropped")
    rows = [(shard, row) for shard, shard_rows in enumerate(records) for row in shard_rows]
    assert len(rows) > 10
    assert f"removed {len(rows):,} spans" in printed
    for shard, row in rows:
        text = corpus[shard][row["line"] - 1]
        assert row["text"] == text[row["start"] : row["end"]]
        file, _, line = row["dropped"].removeprefix("like ").partition(":")
        first_text = corpus[int(file.removesuffix(".jsonl"))][int(line) - 1]
        words = [word for word, _ in tokens_of(row["text"], "words")]
        assert " ".join(words[:6]) in " ".join(word for word, _ in tokens_of(first_text, "words"))
    removed = sum(row["end"] - row["start"] for _, row in rows)
    remaining = sum(len(row["text"]) for shard_rows in read(tmp_path / "out") for row in shard_rows)
    assert removed + remaining <= sum(len(text) for texts in corpus for text in texts)
    dedup(*flags, "--output", tmp_path / "ids", "--id-key", "id")
    for (_, row), (_, id_row) in zip(
        rows, [(0, r) for part in read(tmp_path / "ids/dropped") for r in part], strict=True
    ):
        file, _, line = row["dropped"].removeprefix("like ").partition(":")
        assert id_row["dropped"] == f"like {file.removesuffix('.jsonl')}.{int(line) - 1}"
        assert id_row["id"].endswith(f".{id_row['line'] - 1}")


def test_documents_with_too_many_repeated_tokens_are_dropped_and_others_stay_whole(tmp_path: Path) -> None:
    texts = ["a b c d e f", "x a b c y z", "x a b c d e", "a b c d e f"]
    folder = write_corpus(tmp_path / "in", [texts])
    flags = ["--input", folder, "--min-tokens", 3, "--max-repeated", 0.5, "--keep-dropped"]
    dedup(*flags, "--output", tmp_path / "out")
    assert [row["text"] for row in read(tmp_path / "out")[0]] == texts[:2]
    assert [row["dropped"] for row in read(tmp_path / "out/dropped")[0]] == [
        "6 of 6 tokens repeated",
        "6 of 6 tokens repeated",
    ]
    lines = (folder / "0.jsonl").read_bytes().splitlines()
    assert (tmp_path / "out/0.jsonl").read_bytes().splitlines() == lines[:2]


def test_lines_that_do_not_change_keep_their_bytes_and_wrong_ones_go_to_quarantine(tmp_path: Path) -> None:
    lines = [
        b'{"text":  "One two three four.", "n": 12345678901234567890123}\r\n',
        b"{\n",
        b"\n",
        b'{"text": ["So: one two", "three four!"], "n": 12345678901234567890123}\n',
        b'{"text": ""}\n',
        b'{"text": "One   two\\nthree four."}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    printed = dedup(
        "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--min-tokens", 3, "--on-error", "skip"
    )
    assert (tmp_path / "out/a.jsonl").read_bytes().splitlines() == [
        lines[0].strip(),
        b'{"text":"So: one !","n":12345678901234567890123}',
        lines[4].strip(),
    ]
    assert "kept 3 of 4 documents" in printed
    assert [row["line"] for row in read(tmp_path / "out/quarantine")[0]] == [2]


def test_the_rows_of_a_key_with_more_rows_than_memory_come_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    memory = 8 * key_runs.BYTES_PER_ROW
    paths = [tmp_path / str(shard) for shard in range(3)]
    rows = []
    for shard, path in enumerate(paths):
        keys = rng.choice(np.array([5, 7, 2**64 - 1, 2**63], np.uint64), 90, p=(0.7, 0.1, 0.1, 0.1))
        with open_run_writer(path, 2, 3 * memory) as put:
            for start in range(0, 90, 7):
                places = np.arange(start, min(start + 7, 90), dtype=np.uint64)
                put([keys[start : start + 7], places])
        rows += [(int(key), shard, place) for place, key in enumerate(keys)]
    read_rows = []
    for part in range(3):
        for block in read_sorted(list_runs(paths, 2), part, 3, memory):
            assert len(block.shards) <= 8
            keys, places = (column.tolist() for column in block.columns)
            block_rows = [*zip(keys, block.shards.tolist(), places, strict=True)]
            assert not block.skip or block_rows[0] == next(row for row in read_rows if row[0] == keys[0])
            read_rows += block_rows[block.skip :]
    assert read_rows == sorted(rows)


def test_spans_with_one_key_and_different_checks_are_different() -> None:
    keys, checks, places = (
        np.array(v, np.uint64) for v in ([1, 1, 1, 1, 2], [8, 9, 8, 9, 9], [0, 20, 40, 23, 60])
    )
    rows, later, firsts = find_later_spans(SortedRows(np.zeros(5, np.int64), [keys, checks, places]), 5)
    pairs = [*zip(rows.columns[2][later].tolist(), rows.columns[2][firsts].tolist(), strict=True)]
    assert pairs == [(40, 0)]  # and 23 shares tokens with 20


@pytest.mark.parametrize("span", [2, 3, 7, 50])
def test_equal_spans_have_anchors_at_equal_distances(span: int) -> None:
    rng = random.Random(span)
    common = " ".join(rng.choices("abc", k=span))
    texts = [" ".join([*rng.choices("abc", k=rng.randint(0, 60)), common, "d"]) for _ in range(40)]
    tokenization = Tokenization("words", span, lanes=2)
    (block,) = tokenization.blocks(texts)
    anchors = find_anchors(block, span)
    hashes = [span_hashes(values, span, lane)[anchors.spans] for lane, values in enumerate(block.lanes)]
    is_common = np.array(
        [texts[block.texts[token]][block.starts[token] :].startswith(common) for token in anchors.spans]
    )
    assert np.count_nonzero(is_common) >= 40
    distances = (anchors.anchors - anchors.spans)[is_common]
    assert len(set(distances.tolist())) == 1
    assert len(set(anchors.keys[anchors.anchors[is_common]].tolist())) == 1
    for lane in hashes:
        assert len(set(lane[is_common].tolist())) == 1
        assert not set(lane[is_common].tolist()) & set(lane[~is_common].tolist())


MEMORY = """
import resource, sys
from pathlib import Path
from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.substrings import SubstringDedup
from mega_data.range_outputs import RangeOutputs
from mega_data.readers.ranges import whole_files
from mega_data.task_stages import run_task
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
folder = Path(sys.argv[1])
for name in ("small.jsonl", "large.jsonl"):
    work = folder / f"work-{name}"
    outputs = RangeOutputs(whole_files([folder / name]), folder / "out", work / "parts")
    job = SubstringDedup(CorpusShards((), outputs, "text", ""), work, "words", 50, None, 4 << 20)
    for stage in job.stages():
        print(stage.name, run_task(stage, 0, work))
    print(peak())
"""


def test_memory_does_not_grow_with_the_corpus_or_with_its_repetitions(tmp_path: Path) -> None:
    rng = random.Random(2)
    words = [f"{number:x}" for number in range(1000)]
    for name, documents in (("small.jsonl", 60), ("large.jsonl", 600)):
        with (tmp_path / name).open("w") as file:
            texts = [" ".join(rng.choices(words, k=300)) for _ in range(3)]
            for _ in range(documents):  # almost all spans are repeated
                text = " ".join([*rng.choices(texts, k=3), *rng.choices(words, k=80)])
                file.write(json.dumps({"text": text}) + "\n")
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    lines = process.stdout.splitlines()
    small, large = int(lines[5]), int(lines[11])
    assert "'spans': 5" in lines[8]  # more than 500,000 spans, 80 MB while they are sorted
    assert large - small < 24 << 20
