"""clean and dedup of large files in ranges write the documents and counts of the whole files."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.jsonl_shards import read_lines
from mega_data.readers import ranges
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import InputRange
from mega_schema.errors import FormatError

WORDS = [f"word{n}" for n in range(300)]
TASK = "the quick brown fox jumps over the lazy dog near the old river bank"
STEPS = """
[[step]]
name = "length"
minimum = 60

[[step]]
name = "duplicates"
preset = "exact"

[[step]]
name = "spans"
sentences = 1
fewest = 1

[[step]]
name = "decontaminate"
tasks = ["task.txt"]
window = 20
phrase = 1000

[[step]]
name = "whitespace"
"""


def rows(seed: int, count: int) -> list[dict[str, str]]:
    """Documents, a part of them short, repeated, or with the text of a task."""
    rng = random.Random(seed)
    documents = list[dict[str, str]]()
    for number in range(count):
        text = ". ".join(" ".join(rng.choices(WORDS, k=rng.randrange(2, 9))) for _ in range(4)) + "."
        if number % 5 == 4:
            text = rng.choice(documents)["text"]
        if number % 11 == 3:
            text += f" {TASK} " + " ".join(rng.choices(WORDS, k=20))
        documents.append({"id": f"{seed}-{number}", "text": text if number % 7 else "short"})
    return documents


def lines_of(documents: list[dict[str, str]]) -> list[bytes]:
    lines = [json.dumps(row).encode() + b"\n" for row in documents]
    return [line + b"\n" if number % 9 == 0 else line for number, line in enumerate(lines)]  # blank lines


def write_parquet(path: Path, documents: list[dict[str, str]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(documents), path, row_group_size=20)


def write_members(path: Path, documents: list[dict[str, str]], compress: Callable[[bytes], bytes]) -> None:
    data = b"".join(lines_of(documents))
    path.write_bytes(b"".join(compress(data[start : start + 1777]) for start in range(0, len(data), 1777)))


WRITERS: dict[str, Callable[[Path, list[dict[str, str]]], object]] = {
    "jsonl": lambda path, documents: path.write_bytes(b"".join(lines_of(documents))),
    "jsonl.gz": partial(write_members, compress=partial(gzip.compress, mtime=0)),
    "jsonl.zst": partial(write_members, compress=zstandard.ZstdCompressor().compress),
    "jsonl.bz2": partial(write_members, compress=bz2.compress),
    "parquet": write_parquet,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "task.txt").write_text(TASK)
    (tmp_path / "steps.toml").write_text(STEPS)
    return tmp_path


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the bytes of a range, which are megabytes for the command."""
    split = ranges.split_inputs

    def split_small(inputs: list[InputFile], size: int) -> tuple[InputRange, ...]:
        parts = split(inputs, size)
        assert len(parts) > len(inputs) + 2
        return parts

    return lambda size: monkeypatch.setattr(
        ranges, "split_inputs", lambda inputs, _: split_small(inputs, size)
    )


def invoke(*words: object) -> None:
    outcome = CliRunner().invoke(commands, [*map(str, words)])
    if outcome.exception is not None:
        raise outcome.exception


def clean(output: str, *more: object) -> None:
    config = ("--config", "steps.toml", "--keep-dropped", "--on-error", "skip")
    invoke("clean", "--input", "in", "--output", output, *config, *more)


def dedup(output: str, *more: object) -> None:
    options = ("--keep-dropped", "--keep-keys", "--on-error", "skip")
    invoke("dedup", "--input", "in", "--output", output, *options, *more)


def files(folder: Path) -> dict[str, bytes]:
    """The files of an output: documents for a compressed one, whose frames end where its ranges do."""

    def content(path: Path) -> bytes:
        is_coded = path.name.endswith((".gz", ".zst", ".parquet"))
        return b"".join(read_lines(path)) if is_coded else path.read_bytes()

    return {
        str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_clean_in_ranges_writes_the_files_of_whole_inputs(
    kind: str, folder: Path, divide: Callable[[int], None]
) -> None:
    for seed in range(2):
        WRITERS[kind](folder / f"in/{seed}.{kind}", rows(seed, 150))
    (folder / "in/small.jsonl").write_bytes(b"not JSON\n" + b"".join(lines_of(rows(3, 10))))
    if kind == "jsonl":
        (folder / "in/wrong.jsonl").write_bytes(b"[]\n".join(lines_of(rows(4, 100))))
    clean("whole")
    divide(1500)
    clean("parts")
    assert files(folder / "parts") == files(folder / "whole")
    assert b"-00001-00000" in b"".join(files(folder / "whole").values())  # ids with file and line


@pytest.mark.parametrize(("kind", "preset"), [("jsonl", "exact"), ("parquet", "megatron")])
def test_dedup_in_ranges_writes_the_files_of_whole_inputs(
    kind: str, preset: str, folder: Path, divide: Callable[[int], None]
) -> None:
    for name in "ab":  # equal files: a document of the second is like one of the first
        WRITERS[kind](folder / f"in/{name}.{kind}", rows(0, 150))
    (folder / "in/wrong.jsonl").write_bytes(b"[]\n".join(lines_of(rows(4, 100))))
    dedup("whole", "--preset", preset)
    divide(1500)
    dedup("parts", "--preset", preset)
    assert files(folder / "parts") == files(folder / "whole")
    dropped = (folder / "parts/dropped/b.jsonl").read_text().splitlines()
    assert json.loads(dropped[-1])["dropped"] != json.loads(dropped[0])["dropped"]
    assert '"line":100' in (folder / "parts/quarantine/wrong.jsonl").read_text()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("jsonl", ()),
        ("jsonl", ("--id-key", "id")),
        ("parquet", ("--unit", "characters", "--min-tokens", 20)),
        ("jsonl.gz", ("--max-repeated", 0.5)),
    ],
)
def test_substrings_in_ranges_write_the_files_of_whole_inputs(
    kind: str, more: tuple[object, ...], folder: Path, divide: Callable[[int], None]
) -> None:
    for name in "ab":
        WRITERS[kind](folder / f"in/{name}.{kind}", rows(ord(name), 150))
    if kind == "jsonl":  # a wrong line before each document
        (folder / "in/wrong.jsonl").write_bytes(b"[]\n" + b"[]\n".join(lines_of(rows(ord("a"), 100))))
    words = ("dedup", "--input", "in", "--preset", "substrings", "--min-tokens", 12, "--on-error", "skip")
    words = (*words, "--keep-dropped", *more, "--output")
    invoke(*words, "whole")
    divide(1500)
    invoke(*words, "parts")
    invoke(*words, "two", "--workers", 2)
    whole = files(folder / "whole")
    assert files(folder / "parts") == whole
    assert files(folder / "two") == whole
    assert whole["dropped/b.jsonl"]


@pytest.mark.parametrize("output_format", ["jsonl.zst", "parquet"])
def test_the_parts_of_an_output_in_any_format_are_one_file(
    output_format: str, folder: Path, divide: Callable[[int], None]
) -> None:
    WRITERS["jsonl"](folder / "in/a.jsonl", rows(0, 150))
    dedup("whole", "--output-format", output_format, "--preset", "exact")
    divide(3000)
    dedup("parts", "--output-format", output_format, "--preset", "exact")
    assert files(folder / "parts") == files(folder / "whole")


def test_workers_and_killed_runs_give_the_bytes_of_one_worker(
    folder: Path, divide: Callable[[int], None]
) -> None:
    WRITERS["jsonl.gz"](folder / "in/a.jsonl.gz", rows(0, 150))
    WRITERS["jsonl"](folder / "in/b.jsonl", rows(1, 100))
    divide(2500)

    def bytes_of(output: str) -> dict[Path, bytes]:
        paths = [path for path in (folder / output).rglob("*") if path.is_file()]
        return {path.relative_to(folder / output): path.read_bytes() for path in paths}

    for name, command, more in (("clean", clean, ()), ("dedup", dedup, ("--preset", "exact"))):
        command(f"{name}-1", "--output-format", "jsonl.gz", *more)
        command(f"{name}-2", "--output-format", "jsonl.gz", "--workers", 2, *more)
        assert bytes_of(f"{name}-2") == bytes_of(f"{name}-1")
    # the tasks of another process, then a run that does the others
    for stage in ("keys:1", "keys", "sort", "pairs", "groups", "filter:2", "filter", "join:0"):
        dedup("dedup-3", "--output-format", "jsonl.gz", "--preset", "exact", "--stage", stage)
    dedup("dedup-3", "--output-format", "jsonl.gz", "--preset", "exact")
    assert bytes_of("dedup-3") == bytes_of("dedup-1")


def test_a_wrong_line_of_a_range_has_its_number_in_the_file(
    folder: Path, divide: Callable[[int], None]
) -> None:
    data = lines_of(rows(0, 150))
    data[120] = b'{"text": 1}\n'
    number = b"".join(data[:121]).count(b"\n")
    for name, content in (("a.jsonl", b"".join(data)), ("a.jsonl.gz", b"")):
        for path in (folder / "in").iterdir():
            path.unlink()
        (folder / "in" / name).write_bytes(content)
        if not content:
            write_members(folder / "in" / name, rows(0, 150)[:90], partial(gzip.compress, mtime=0))
            with (folder / "in" / name).open("ab") as file:
                file.write(gzip.compress(b"".join(data[90:]), mtime=0))
        divide(1000)
        for command, more in (("clean", ["--step", "whitespace"]), ("dedup", [])):
            with pytest.raises(FormatError, match=rf"in/{name}:{number}: no text under 'text'"):
                invoke(command, "--input", "in", "--output", f"out-{command}", *more)


def test_a_corrected_input_keeps_the_finished_tasks_of_others(
    folder: Path, divide: Callable[[int], None]
) -> None:
    WRITERS["jsonl"](folder / "in/a.jsonl", rows(0, 150))
    data = b"".join(lines_of(rows(1, 150)))
    (folder / "in/b.jsonl").write_bytes(data)
    divide(5000)
    words = ("dedup", "--input", "in", "--preset", "exact", "--output")
    invoke(*words, "whole")
    middle = data.index(b"\n{", len(data) // 2) + 1
    (folder / "in/b.jsonl").write_bytes(data[:middle] + b"!" + data[middle + 1 :])
    with pytest.raises(FormatError, match="in/b.jsonl:"):
        invoke(*words, "out")
    markers = folder / "out/.work/done/keys"
    of_first = len(ranges.split_inputs([InputFile(folder / f"in/{name}.jsonl", "jsonl") for name in "ab"], 1))
    markers_before = {path.name: path.stat().st_mtime_ns for path in markers.iterdir()}
    (folder / "in/b.jsonl").write_bytes(data)
    invoke(*words, "out", "--stage", "keys")
    state_after = {path.name: path.stat().st_mtime_ns for path in markers.iterdir()}
    unchanged = [name for name, time in markers_before.items() if state_after[name] == time]
    assert unchanged
    assert len(state_after) == of_first
    invoke(*words, "out")
    assert files(folder / "out") == files(folder / "whole")
