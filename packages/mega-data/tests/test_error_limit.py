"""`--max-errors`: a run with more wrong rows fails, and finished work is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_data.error_limit import ErrorLimit, TooManyErrors
from mega_data.resumable_output import ResumableOutput
from mega_schema.errors import ConfigError

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
PAGE = "<html><body><p>" + "Some words of a page that is long enough to be kept. " * 8 + "</p></body></html>"


def call(*words: object) -> Result:
    return CliRunner().invoke(commands, [str(word) for word in words])


def corpus(folder: Path, wrong: int = 3) -> Path:
    """Four files of ten lines; the last ones of each are wrong."""
    folder.mkdir()
    for shard in range(4):
        lines = [json.dumps({"text": f"{shard} {n}"}) for n in range(10 - wrong)] + ["{oops"] * wrong
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def words_of(command: str, folder: Path, output: Path) -> tuple[object, ...]:
    if command == "preprocess":
        return (command, "--input", folder, "--output-prefix", output / "data", *NULL)
    steps = ("--step", "whitespace") if command == "clean" else ()
    return (command, "--input", folder, "--output", output, *steps)


COMMANDS = pytest.mark.parametrize("command", ["preprocess", "clean", "dedup"])


@COMMANDS
@pytest.mark.parametrize("limit", ["12", "30%", "30.5%"])
def test_as_many_wrong_rows_as_allowed_do_not_end_a_run(command: str, limit: str, tmp_path: Path) -> None:
    words = words_of(command, corpus(tmp_path / "in"), tmp_path / "out")
    result = call(*words, "--on-error", "skip", "--max-errors", limit)
    assert result.exit_code == 0, (result.output, result.exception)


@COMMANDS
@pytest.mark.parametrize(
    ("limit", "count"),
    [("11", "found 12, wanted at most 11"), ("29.9%", "found 12 of 40, wanted at most 29.9%")],
)
def test_one_more_wrong_row_than_allowed_ends_the_run_and_a_higher_limit_goes_on(
    command: str, limit: str, count: str, tmp_path: Path
) -> None:
    words = (*words_of(command, corpus(tmp_path / "in"), tmp_path / "out"), "--on-error", "skip")
    ended = call(*words, "--max-errors", limit)
    line = str(ended.exception)
    assert line.startswith("--max-errors: too many rows are wrong, the first is ")
    assert f"{tmp_path / 'in/0.jsonl'}:8, not JSON" in line
    assert line.count("found ") == 1
    assert count in line
    assert not [*(tmp_path / "out").glob("*.jsonl"), *(tmp_path / "out").glob("*.idx")]
    after = call(*words, "--max-errors", "12")
    assert after.exit_code == 0, (after.output, after.exception)
    assert call(*words_of(command, tmp_path / "in", tmp_path / "new"), "--on-error", "skip").exit_code == 0
    assert files(tmp_path / "out") == files(tmp_path / "new")


def files(folder: Path) -> dict[str, bytes]:
    """Of a run; without the sidecars and the marker, which name paths and times."""
    contents = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in contents.items() if not name.startswith(".mega-data")}


def test_a_run_above_its_limit_reads_no_row_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*words_of("preprocess", corpus(tmp_path / "in"), tmp_path / "out"), "--on-error", "skip")
    assert call(*words, "--max-errors", "10%").exception is not None
    added = list[int]()
    add = ResumableOutput.add
    monkeypatch.setattr(
        ResumableOutput,
        "add",
        lambda parts, key, document: (added.append(len(document.sequences)), add(parts, key, document)),
    )
    assert call(*words, "--max-errors", "50%").exit_code == 0
    assert sum(added) == 0  # the share is checked at the end, when all was noted


def test_tasks_of_an_earlier_process_count(tmp_path: Path) -> None:
    words = (*words_of("clean", corpus(tmp_path / "in"), tmp_path / "out"), "--on-error", "skip")
    for task in range(3):
        assert call(*words, "--max-errors", "10", "--stage", f"00-pass/pass:{task}").exit_code == 0
    ended = call(*words, "--max-errors", "10")
    assert "found 12, wanted at most 10" in str(ended.exception)
    assert call(*words).exit_code == 0  # no limit, as before


def test_a_share_is_of_the_rows_of_the_corpus_not_of_every_pass(tmp_path: Path) -> None:
    words = words_of("clean", corpus(tmp_path / "in"), tmp_path / "out")
    words = (*words, "--step", "duplicates", "--step", "whitespace", "--on-error", "skip")
    assert "found 12 of 40" in str(call(*words, "--max-errors", "29%").exception)
    assert call(*words, "--max-errors", "30%").exit_code == 0


def test_damaged_places_above_the_limit_end_an_extraction(tmp_path: Path) -> None:
    import gzip

    head = f"WARC-Type: conversion\r\nWARC-Target-URI: http://a\r\nContent-Length: {len(PAGE)}"
    page = f"WARC/1.0\r\n{head}\r\n\r\n{PAGE}\r\n\r\n"
    whole = gzip.compress(page.encode())
    (tmp_path / "a.warc.wet.gz").write_bytes(whole * 2 + whole[:-20])
    words = (
        "extract",
        "--input",
        tmp_path / "a.warc.wet.gz",
        "--output",
        tmp_path / "out",
        "--on-error",
        "skip",
    )
    ended = call(*words, "--max-errors", "0")
    assert f"the first is {tmp_path / 'a.warc.wet.gz'}: " in str(ended.exception), ended.output
    assert "found 1, wanted at most 0" in str(ended.exception)
    assert not list((tmp_path / "out").glob("*.jsonl"))
    assert call(*words, "--max-errors", "50%").exit_code == 0


@pytest.mark.parametrize("command", ["preprocess", "clean", "dedup", "extract"])
def test_a_limit_without_skipping_is_refused(command: str, tmp_path: Path) -> None:
    words = words_of(command, corpus(tmp_path / "in"), tmp_path / "out")
    error = call(*words, "--max-errors", "5").exception
    assert isinstance(error, ConfigError)
    assert "--on-error skip --max-errors 5" in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("percent", range(101))
def test_a_share_that_is_reached_exactly_is_not_above_the_limit(percent: int) -> None:
    ErrorLimit.parse(f"{percent}%").check(percent, str, 100)  # 0.29 * 100 is less than 29
    with pytest.raises(TooManyErrors):
        ErrorLimit.parse(f"{percent}%").check(percent + 1, str, 100)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "-1%", "nan%", "a", "%", "1%%"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-errors: no limit"):
        ErrorLimit.parse(text)


def test_an_extraction_without_a_document_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<html></html>")
    result = call("extract", "--input", tmp_path / "a.html", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "none of 1 document is left: exit code 1" in result.stderr
