"""clean and dedup read the same documents from all formats, and quarantine other lines."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_data.jsonl_shards import find_shards, output_name, read_lines
from mega_data.readers.compression import open_decompressed
from mega_schema.errors import ConfigError, FormatError, MegaError

TEXTS = ["one and the same", "another", "one and the same", "çok güzel", ""]
WRONG = ['{"text": 3}', "{", "[1, 2]", '"a string"', '{"other": "x"}']


def call(*arguments: object) -> Result:
    return CliRunner().invoke(commands, [*map(str, arguments)])


def call_ok(*arguments: object) -> Result:
    outcome = call(*arguments)
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    return outcome


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def documents() -> list[dict[str, Any]]:
    return [{"id": f"d{n}", "text": text, "score": n / 4, "n": n} for n, text in enumerate(TEXTS)]


def jsonl(path: Path, values: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in values))
    return path


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("command", ["dedup", "clean"])
def test_a_table_gives_what_its_rows_as_json_lines_give(tmp_path: Path, form: str, command: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = jsonl(tmp_path / "plain/a.jsonl", [json.dumps(row) for row in documents()])
    table, path = pyarrow.Table.from_pylist(documents()), tmp_path / f"a.{form}"
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=2)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    how = ["--preset", "exact"] if command == "dedup" else ["--step", "duplicates", "--step", "length"]
    for name, source in (("one", plain), ("two", path)):
        call_ok(command, "--input", source, "--output", tmp_path / name, *how)
    result = rows(tmp_path / "two/a.jsonl")
    assert result == rows(tmp_path / "one/a.jsonl")
    assert [row["n"] for row in result] == [0, 1, 3, 4]


def test_what_a_table_holds_and_json_does_not_is_written_as_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from datetime import date
    from decimal import Decimal

    row = {"text": "x", "raw": b"caf\xc3\xa9 \xff", "on": date(2020, 2, 1), "much": Decimal("1.50")}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (values,) = map(json.loads, read_lines(tmp_path / "a.parquet"))
    assert values == {"text": "x", "raw": "café \ufffd", "on": "2020-02-01", "much": "1.50"}


def test_a_damaged_table_and_a_missing_column_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    error = call("dedup", "--input", path, "--output", tmp_path / "out").exception
    assert str(error).startswith(f"{path}:1: no text under 'text': found body, wanted a string there")
    path.write_bytes(path.read_bytes()[:-40])
    error = call("dedup", "--input", path, "--output", tmp_path / "out2").exception
    assert isinstance(error, FormatError)
    assert str(error).startswith(f"{path}: damaged")


def test_shards_are_files_globs_folders_and_saved_datasets_but_not_stdin(tmp_path: Path) -> None:
    for name in ("b.jsonl.gz", "a.parquet", "saved/state.json", "saved/data-0.arrow", "c.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    named = [tmp_path / "b.jsonl.gz", tmp_path / "*.txt", tmp_path / "saved", tmp_path / "a.parquet"]
    names = [path.name for path in find_shards(named)]
    assert (
        names
        == ["a.parquet", "b.jsonl.gz", "c.txt", "data-0.arrow"]
        == [p.name for p in find_shards(named[::-1])]
    )
    assert [output_name(path) for path in find_shards(named)] == [
        "a.jsonl",
        "b.jsonl",
        "c.txt",
        "data-0.jsonl",
    ]
    with pytest.raises(ConfigError, match="--input: stdin is read once"):
        find_shards(["-"])
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ConfigError, match="two files of one name"):
        find_shards([tmp_path / "a.jsonl", tmp_path / "a.parquet"])


def test_what_clean_kept_is_read_without_what_it_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jsonl(tmp_path / "in/a.jsonl", [json.dumps({"text": text}) for text in ("one two", "three")] + ["{"])
    jsonl(tmp_path / "in/empty.jsonl", [])
    clean = ["clean", "--input", tmp_path / "in", "--step", "length:minimum=6", "--on-error", "skip"]
    log = call_ok(*clean, "--output", tmp_path / "kept", "--keep-dropped").stderr
    assert len(list((tmp_path / "kept").rglob("a.jsonl"))) == 3  # kept, dropped, set apart
    (tmp_path / "kept/.work").mkdir()
    jsonl(tmp_path / "kept/.work/half.jsonl", ["{"])
    assert [path.name for path in find_shards([tmp_path / "kept"])] == ["a.jsonl", "empty.jsonl"]
    dedup_result = call_ok(
        "dedup", "--input", tmp_path / "kept", "--output", tmp_path / "out", "--preset", "exact"
    )
    assert "kept: read without dropped and quarantine and report.json" in caplog.text
    assert (tmp_path / "out/a.jsonl").read_text() == (tmp_path / "kept/a.jsonl").read_text()
    seconds = [int(seconds_left) for seconds_left in re.findall(r"(\d+) s left", log + dedup_result.stderr)]
    assert all(seconds_left < 1000 for seconds_left in seconds), seconds


def test_lz4_is_read_and_a_damaged_one_named(tmp_path: Path) -> None:
    frame = pytest.importorskip("lz4.frame")
    text = b"".join(b"line %d\n" % n for n in range(9000))
    packed = frame.compress(text[:4000]) + frame.compress(text[4000:])
    path = tmp_path / "a.jsonl.lz4"
    path.write_bytes(packed)
    assert b"".join(read_lines(path)) == text
    for harm in (packed[:-30], b"nothing packed", packed[:90] + bytes(60) + packed[150:]):
        path.write_bytes(harm)
        with pytest.raises(FormatError, match=r"a\.jsonl\.lz4: damaged"), open_decompressed(path) as file:
            file.read()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("command", ["dedup", "clean"])
def test_lines_that_are_no_documents_are_set_apart_with_the_reason(
    tmp_path: Path, command: str, workers: int
) -> None:
    good = [json.dumps(row) for row in documents()]
    mixed = [line for pair in zip(good, WRONG, strict=True) for line in pair]
    folder = jsonl(tmp_path / "in/a.jsonl", [*mixed, "", "\x00"]).parent
    jsonl(folder / "b.jsonl", good)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "b.jsonl").read_bytes()))
    (folder / "b.jsonl").unlink()
    task = tmp_path / "task.txt"
    task.write_text("words that no document of them has in it at all\n")
    steps = ["--step", f"decontaminate:tasks={task}", "--step", "duplicates"]
    how = ["--preset", "exact"] if command == "dedup" else steps
    flags = ["--input", folder, "--output", tmp_path / "out", *how, "--workers", workers]
    error = call(command, *flags).exception
    assert str(error).startswith(f"{folder}/a.jsonl:2: no text under 'text': found text")
    assert "--on-error skip" in str(error)
    flags[3] = tmp_path / "kept"
    outcome = call_ok(command, *flags, "--on-error", "skip")
    inner = "" if command == "dedup" else "00-pass"
    assert f"note: 6 lines were skipped, see {tmp_path / 'kept/quarantine'}" in outcome.stderr
    apart = rows(tmp_path / "kept/quarantine" / inner / "a.jsonl")
    assert [(row["file"], row["line"], row["row"]) for row in apart] == [
        (f"{folder}/a.jsonl", line, text)
        for line, text in zip([2, 4, 6, 8, 10, 12], [*WRONG, "\x00"], strict=True)
    ]
    assert [row["reason"].partition(":")[0] for row in apart] == [
        "no text under 'text'", "not JSON", "not a JSON object", "not a JSON object", "no text under 'text'",
        "not JSON",
    ]  # fmt: skip
    assert not (tmp_path / "kept/quarantine" / inner / "b.jsonl").exists()
    assert [row["n"] for row in rows(tmp_path / "kept/a.jsonl")] == [0, 1, 3, 4]
    assert [row["n"] for row in rows(tmp_path / "kept/b.jsonl")] == [4]  # an empty text is like no other
    if command == "clean":
        assert json.loads((tmp_path / "kept/report.json").read_bytes())["skipped"] == 6
        assert "6 lines are not documents" in (tmp_path / "kept/report.html").read_text()


def test_near_duplicates_are_found_around_lines_that_are_passed_over(tmp_path: Path) -> None:
    words = " ".join(f"word{n}" for n in range(60))
    texts = [words, words + " more", "nothing like it " * 9]
    wrong = jsonl(tmp_path / "in/a.jsonl", ["{", *(json.dumps({"text": text}) for text in texts), "3"])
    call_ok(
        "dedup", "--input", wrong, "--output", tmp_path / "out", "--preset", "megatron", "--on-error", "skip"
    )
    assert [row["text"] for row in rows(tmp_path / "out/a.jsonl")] == [texts[0], texts[2]]


@pytest.mark.parametrize("command", ["dedup", "clean"])
def test_documents_that_go_are_told_by_the_id_of_the_one_that_stays(tmp_path: Path, command: str) -> None:
    for name, start in (("a", 0), ("b", 3)):
        documents = [{"url": f"http://é{n + start}", "text": text} for n, text in enumerate(TEXTS[:3])]
        jsonl(tmp_path / f"in/{name}.jsonl", [json.dumps(row) for row in documents])
    how = ["--preset", "exact"] if command == "dedup" else ["--step", "duplicates"]
    call_ok(
        command, "--input", tmp_path / "in", "--output", tmp_path / "out", *how, "--keep-dropped",
        "--id-key", "url",
    )  # fmt: skip
    inner = tmp_path / "out/dropped" / ("" if command == "dedup" else "00-duplicates")
    like = [(row["url"], row["dropped"]) for name in "ab" for row in rows(inner / f"{name}.jsonl")]
    assert like == [
        ("http://é2", "like http://é0"),
        ("http://é3", "like http://é0"),
        ("http://é4", "like http://é1"),
        ("http://é5", "like http://é0"),
    ]


@pytest.mark.parametrize("command", ["dedup", "clean"])
def test_a_document_without_an_id_is_named_or_set_apart(tmp_path: Path, command: str) -> None:
    path = jsonl(
        tmp_path / "in/a.jsonl", ['{"id": 7, "text": "x"}', '{"text": "y"}', '{"id": [], "text": ""}']
    )
    how = ["--preset", "exact"] if command == "dedup" else ["--step", "length"]
    flags = ["--input", path, "--output", tmp_path / "out", *how, "--id-key", "id"]
    error = call(command, *flags).exception
    assert isinstance(error, MegaError)
    assert str(error).startswith(f"{path}:2: no id under 'id': found text, wanted a string or a number there")
    flags[3] = tmp_path / "kept"
    assert "note: 2 lines" in call_ok(command, *flags, "--on-error", "skip").stderr
    assert rows(tmp_path / "kept/a.jsonl") == [{"id": 7, "text": "x"}]


@pytest.mark.parametrize("command", ["dedup", "clean"])
def test_what_is_read_and_how_fast_is_told_after_each_file(tmp_path: Path, command: str) -> None:
    task = tmp_path / "task.txt"
    task.write_text("words that no document of them has in it at all\n")
    for name in "ab":
        jsonl(tmp_path / f"in/{name}.jsonl", [json.dumps({"text": "x" * 400_000})] * 2)
    how = ["--preset", "exact"] if command == "dedup" else ["--step", f"decontaminate:tasks={task}"]
    log_lines = call_ok(
        command, "--input", tmp_path / "in", "--output", tmp_path / "out", *how
    ).stderr.splitlines()
    stages = ["keys", "filter"] if command == "dedup" else ["00-pass: count", "00-pass: pass"]
    for stage in stages:
        first, last = (line for line in log_lines if line.startswith(f"{stage} "))
        assert re.fullmatch(rf"{stage} 1/2: 0\.8 of 1\.6 MB, 2 documents, [0-9.]+ MB/s, \d+ s left", first), (
            first
        )
        assert last.startswith(f"{stage} 2/2: 1.6 of 1.6 MB")
        assert ", 4 documents, " in last
        assert last.endswith("0 s left")


def test_numbers_keep_their_digits_when_a_step_changes_the_text(tmp_path: Path) -> None:
    number = "12345678901234567890123456789"
    line = f'{{"id": {number}, "n": [-{number}, 1.5], "text": "a  b", "u": "\\u00e9"}}'
    path = jsonl(tmp_path / "in/a.jsonl", [line])
    call_ok("clean", "--input", path, "--output", tmp_path / "out", "--step", "whitespace")
    text = (tmp_path / "out/a.jsonl").read_text("utf-8")
    assert text == f'{{"id":{number},"n":[-{number},1.5],"text":"a b","u":"é"}}\n'
    jsonl(tmp_path / "in/b.jsonl", [line])
    exact = ["--preset", "exact", "--keep-dropped"]
    call_ok("dedup", "--input", tmp_path / "in", "--output", tmp_path / "kept", *exact)
    assert f'"id":{number}' in (tmp_path / "kept/dropped/b.jsonl").read_text("utf-8")


def test_sentences_in_a_list_are_a_text_of_clean_and_dedup(tmp_path: Path) -> None:
    wrong = ['{"text": ["a", null]}', '{"text": [0]}']
    texts = ['{"text": ["One.", "Two."]}', '{"text": "One. Two."}', '{"text": ["A  b."], "n": 1}']
    path = jsonl(tmp_path / "in/a.jsonl", [*texts, *wrong])
    flags = ["--on-error", "skip", "--input", path]
    call_ok("dedup", *flags, "--output", tmp_path / "one", "--preset", "exact")
    assert rows(tmp_path / "one/a.jsonl") == [json.loads(texts[0]), json.loads(texts[2])]
    call_ok("clean", *flags, "--output", tmp_path / "two", "--step", "length:maximum=8")
    assert rows(tmp_path / "two/a.jsonl") == [json.loads(texts[2])]
    call_ok("clean", *flags, "--output", tmp_path / "new", "--step", "whitespace", "--step", "duplicates")
    assert rows(tmp_path / "new/a.jsonl") == [{"text": "One. Two."}, {"text": "A b.", "n": 1}]


def test_nan_and_a_byte_order_mark_are_read_by_clean_and_dedup(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two", "x": NaN}\n')
    for command, *how in (("dedup", "--preset", "exact"), ("clean", "--step", "length")):
        call_ok(command, "--input", path, "--output", tmp_path / command, *how)
        assert (tmp_path / command / "a.jsonl").read_bytes() == path.read_bytes()


def test_a_name_that_is_not_utf8_is_written_beside_what_was_dropped(tmp_path: Path) -> None:
    import os

    path = jsonl(tmp_path / "a.jsonl", ['{"text": "one"}'] * 2)
    (tmp_path / "in").mkdir()
    odd = tmp_path / "in" / os.fsdecode(b"\xff.jsonl")
    path.rename(odd)
    words = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--preset", "exact", "--keep-dropped"]
    call_ok("dedup", *words)
    (row,) = (json.loads(line) for line in (tmp_path / "out/dropped" / odd.name).read_bytes().splitlines())
    assert row["dropped"].startswith("like ")


def test_gopher_quality_without_a_least_count_takes_an_empty_document() -> None:
    from mega_data.clean.registry import step_from_flag
    from mega_data.clean.step import Row

    work = step_from_flag("gopher-quality:fewest=0").step.start()
    assert work(Row({"text": ""}, "text", 0, 1)) == "fewer than two stop words"
