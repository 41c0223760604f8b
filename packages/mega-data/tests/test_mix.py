"""A mix holds each document in one split, as often as its weight requires, in an order by seed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mega_data.cli import commands
from mega_data.inspect import verify_dataset
from mega_data.mix.dataset_mix import DatasetMix
from mega_data.mix.random_keys import choose_split, random_keys
from mega_data.mix.sources import divide_source, parse_fractions, parse_sources, training_epochs
from mega_data.task_stages import run_task
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import IndexedWriter, open_dataset
from mega_schema.errors import ConfigError, FormatError

SPLITS = ("train", "valid", "test")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write datasets `a` of 400 documents and `b` of 100; the first id of a document identifies it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, first, count in (("a", 0, 400), ("b", 1000, 100)):
        with IndexedWriter(Path(name), "uint16") as writer:
            for number in range(first, first + count):
                for sequence in range(rng.integers(1, 4)):
                    start = [number] if sequence == 0 else []
                    writer.add([*start, *rng.integers(2000, 60000, rng.integers(1, 40))])
                writer.end_document()


def documents(prefix: Path | str) -> list[tuple[tuple[int, ...], ...]]:
    data = open_dataset(Path(prefix))
    bounds = data.documents.tolist()
    return [
        tuple(tuple(data[sequence].tolist()) for sequence in range(first, last))
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]


def mix(output: str, *words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["mix", "--output", output, *words])
    assert end.value.code == code


def small_mix(name: str, memory: int, seed: int = 1) -> DatasetMix:
    """Run a mix of two thirds of `a` and three epochs of `b` in this process."""
    opened = parse_sources(["1", "a", "1", "b"])
    fractions = parse_fractions("80,15,5")
    job = DatasetMix(opened, (0.66, 3.0), fractions, seed, Path(name), Path(f"{name}-work"), None, memory)
    job.begin()
    for stage in job.stages():
        for task in range(stage.tasks):
            run_task(stage, task, job.work)
    for split in range(3):
        job.publish(split)
    return job


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.usefixtures("sources")
def test_without_weights_each_document_is_in_exactly_one_split(tmp_path):
    mix("out", "--data-path", "a", "b", "--split", "80,15,5")
    parts = [documents(f"out/{name}_document") for name in SPLITS]
    assert Counter(sum(parts, [])) == Counter(documents("a") + documents("b"))
    assert all(parts)
    assert [len(part) / 500 for part in parts] == pytest.approx([0.8, 0.15, 0.05], abs=0.04)
    for name in SPLITS:
        verify_dataset(open_dataset(Path(f"out/{name}_document")), 65536)


@pytest.mark.usefixtures("sources")
def test_the_documents_of_both_sources_are_shuffled():
    mix("out", "--data-path", "a", "b", "--split", "1")
    numbers = np.array([document[0][0] for document in documents("out/train_document")])
    positions = np.flatnonzero(numbers >= 1000) / len(numbers)
    assert positions.mean() == pytest.approx(0.5, abs=0.1)
    assert positions.std() == pytest.approx(12**-0.5, abs=0.05)
    of_first = numbers[numbers < 1000]
    assert abs(np.corrcoef(of_first, np.arange(len(of_first)))[0, 1]) < 0.15


@pytest.mark.usefixtures("sources")
def test_epochs_repeat_whole_documents_of_training_only():
    small_mix("out", 1 << 20)
    counts = Counter(documents("out/train_document"))
    assert {counts[document] for document in documents("a")} == {0, 1}
    assert {counts[document] for document in documents("b")} == {0, 3}
    selected = sum(counts[document] for document in documents("a"))
    split = choose_split(1, 0, np.arange(400), parse_fractions("80,15,5"))
    assert selected / (split == 0).sum() == pytest.approx(0.66, abs=0.08)
    for name in SPLITS[1:]:
        assert set(Counter(documents(f"out/{name}_document")).values()) == {1}


@pytest.mark.usefixtures("sources")
def test_the_bytes_depend_on_the_seed_and_not_on_memory():
    large, small = small_mix("large", 1 << 20), small_mix("small", 3000)
    assert len(small.ranges()) > 40
    assert len(small.buckets()) > 40
    assert len(large.buckets()) == 3
    assert files_of("large") == files_of("small")
    small_mix("other", 1 << 20, seed=2)
    assert files_of("large") != files_of("other")


@pytest.mark.usefixtures("sources")
def test_workers_and_a_run_in_parts_write_the_same_bytes():
    options = ("--data-path", "0.5", "a", "0.5", "b")
    mix("single", *options)
    mix("two", *options, "--workers", "2")
    for stage in ("plan", "sort:1", "sort", "gather:0", "gather", "index"):
        mix("parts", *options, "--stage", stage)
        assert not Path("parts/blend.json").exists()
    mix("parts", *options)
    datasets = {name: text for name, text in files_of("single").items() if name.endswith((".bin", ".idx"))}
    for folder in ("two", "parts"):
        assert datasets.items() <= files_of(folder).items()


@pytest.mark.usefixtures("sources")
def test_the_report_counts_what_is_in_the_datasets(capfd):
    mix("out", "--data-path", "3", "a", "1", "b", "--tokens", "20000", "--split", "90,10")
    assert "note: test: no document" in capfd.readouterr().err
    report = json.loads(Path("out/report.json").read_text())["splits"]
    for name in SPLITS[:2]:
        data = open_dataset(Path(f"out/{name}_document"))
        assert sum(row["tokens"] for row in report[name]) == data.tokens
        assert sum(row["documents"] for row in report[name]) == len(data.documents) - 1
    first, second = report["train"]
    assert first["share"] == pytest.approx(0.75, abs=0.05)
    assert first["tokens"] + second["tokens"] == pytest.approx(20000, rel=0.1)
    assert first["epochs"] == first["tokens"] / first["available_tokens"]
    assert json.loads(Path("out/blend.json").read_text()) == {
        name: [f"{name}_document"] for name in SPLITS[:2]
    }


@pytest.mark.usefixtures("sources")
def test_weights_only_writes_the_blend_and_no_dataset(capfd):
    mix("out", "--data-path", "3", "a", "5", "b", "--weights-only")
    assert {path.name for path in Path("out").iterdir()} == {".mega-data.json", "blend.txt", "report.json"}
    words = Path("out/blend.txt").read_text().split()
    assert words == ["0.375", str(Path("a").resolve()), "0.625", str(Path("b").resolve())]
    total = sum(open_dataset(Path(name)).tokens for name in "ab")
    rows = json.loads(Path("out/report.json").read_text())["splits"]["train"]
    assert [row["tokens"] for row in rows] == [round(total * 0.375), round(total * 0.625)]
    assert "62.50%" in capfd.readouterr().out


@pytest.mark.usefixtures("sources")
def test_a_source_of_many_epochs_is_noted(capfd):
    mix("out", "--data-path", "1", "a", "9", "b", "--tokens", "60000")
    assert "note: b: read for " in capfd.readouterr().err


@pytest.mark.usefixtures("sources")
def test_a_second_mix_replaces_the_first_with_its_splits():
    mix("out", "--data-path", "a")
    mix("out", "--data-path", "b", "--split", "90,10", "--seed", "7")
    assert not Path("out/test_document.idx").exists()
    assert not Path("out/test_document.bin").exists()
    assert {document[0][0] >= 1000 for document in documents("out/train_document")} == {True}


@pytest.mark.usefixtures("sources")
def test_a_run_with_another_seed_does_not_continue_an_unfinished_one(capfd):
    mix("out", "--data-path", "a", "--stage", "sort")
    mix("out", "--data-path", "a", "--seed", "2", code=2)
    assert "contains a run with other seed" in capfd.readouterr().err
    mix("out", "--data-path", "a", "--stage", "shuffle", code=2)
    assert "--stage: no such stage: found shuffle, wanted plan | sort" in capfd.readouterr().err


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data-path 0.3 a b", "--data-path: weights and prefixes do not alternate: found 0.3 a b"),
        ("--data-path 0 a 1 b", "--data-path: not a weight: found 0 a, wanted a number above 0"),
        ("--data-path nan a 1 b", "--data-path: not a weight: found nan a"),
        ("--data-path a ./a", "--data-path: names a dataset twice: found a"),
        ("--data-path a c", "c.idx: no such file"),
        ("--data-path empty", "--data-path: names a dataset without tokens: found empty"),
        ("--data-path a wide", "wide.idx: dtype: found int32, wanted uint16 as a"),
        ("--data-path a --split 0,1", "--split: is not three shares: found '0,1'"),
        ("--data-path a --split 1,x", "--split: is not three shares: found '1,x'"),
        ("--data-path a --weights-only --split 1", "--split: has no effect with --weights-only"),
        ("--data-path a --weights-only --work-dir w", "--work-dir: has no effect with --weights-only"),
        ("--data-path a --output .", "--output: contains an input: found a.bin"),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_written(words, message, capfd):
    with IndexedWriter(Path("empty"), "uint16") as writer:
        writer.end_document()
    with IndexedWriter(Path("wide"), "int32") as writer:
        writer.add([1])
        writer.end_document()
    mix("out", *words.split(), code=2)
    assert message in capfd.readouterr().err
    assert not any(Path("out").glob("*"))


@pytest.mark.usefixtures("sources")
def test_a_source_that_changes_before_the_run_resumes_is_refused(capfd):
    mix("out", "--data-path", "a", "--stage", "sort")
    with IndexedWriter(Path("a"), "uint16") as writer:
        writer.add([5])
        writer.end_document()
    mix("out", "--data-path", "a", code=2)
    assert "contains a run with other inputs" in capfd.readouterr().err


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("size", [1, 100, 5000, 10**9])
def test_ranges_cover_a_source_once_and_fit_the_size(size):
    source = parse_sources(["a"])[0]
    ranges = divide_source(source, 0, size, 37)
    assert [part.first for part in ranges] == [0, *(part.last for part in ranges[:-1])]
    assert ranges[-1].last == 400
    lengths = [2 * sum(map(len, document)) for document in documents("a")]
    for part in ranges:
        count = part.last - part.first
        assert count == 1 or (sum(lengths[part.first : part.last]) <= size and count <= 37)


@pytest.mark.usefixtures("sources")
def test_epochs_follow_the_weights():
    opened = parse_sources(["1", "a", "3", "b"])
    epochs = training_epochs(opened, 0.5, 1000)
    assert [round(e * source.data.tokens * 0.5) for e, source in zip(epochs, opened, strict=True)] == [
        250,
        750,
    ]
    assert training_epochs(parse_sources(["a", "b"]), 0.5, None) == (1.0, 1.0)


def test_keys_are_uniform_and_independent_of_the_range():
    keys = random_keys(3, "order/0", 0, np.arange(20000))
    assert np.array_equal(keys[500:], random_keys(3, "order/0", 0, np.arange(500, 20000)))
    assert len(np.unique(keys)) == len(keys)
    counts = np.bincount((keys >> np.uint64(60)).astype(int), minlength=16)
    assert abs(counts - 1250).max() < 5 * 1250**0.5
    split_keys = random_keys(3, "split", 0, np.arange(20000))
    assert abs(np.corrcoef(keys.astype(float), split_keys.astype(float))[0, 1]) < 0.03


def test_errors_are_of_the_users_input():
    with pytest.raises(ConfigError):
        parse_fractions("")
    with pytest.raises(FormatError):
        parse_sources(["nothing"])


@pytest.mark.usefixtures("sources")
def test_a_mix_larger_than_the_disk_or_of_too_many_epochs_is_refused(capsys, monkeypatch):
    mix("out", "--data-path", "0.3", "a", "0.7", "b", "--tokens", "9" * 20, code=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "repeats a dataset too often" in error
    disk = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=1000))
    mix("out", "--data-path", "a", "b", code=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "has not enough room" in error
    assert not Path("out").exists()


@pytest.mark.usefixtures("sources")
def test_a_mix_without_training_documents_is_refused(capsys):
    mix("out", "--data-path", "a", "b", "--tokens", "1", "--seed", "1", code=2)
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: --tokens, --split: no document is left for training")
    assert error.count("error: ") == 1
    assert not list(Path("out").glob("[!.]*"))


@pytest.mark.usefixtures("sources")
def test_a_mix_is_repeated_beside_the_cache_of_a_training_and_names_foreign_files(capsys):
    mix("out", "--data-path", "a", "--weights-only")
    mix("out", "--data-path", "a")
    assert not Path("out/blend.txt").exists()
    Path("out/index-cache").mkdir()
    Path("out/index-cache/order.npy").touch()
    mix("out", "--data-path", "b")
    assert not Path("out/index-cache").exists()
    mix("out", "--data-path", "b", "--weights-only")
    assert not Path("out/blend.json").exists()
    Path("out/notes.md").touch()
    capsys.readouterr()
    mix("out", "--data-path", "b", code=2)
    assert "found out with notes.md; hint" in capsys.readouterr().err
