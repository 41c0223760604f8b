"""Damaged files of a work folder are refused by name, and refused commands leave no work folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_schema.errors import ConfigError, FormatError, MegaError

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENIZER = ("train-tokenizer", "--vocab-size", "300", "--output", "out")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    Path("empty.jsonl").write_text("")
    return tmp_path


def run(*words: str) -> str:
    result = CliRunner().invoke(commands, words)
    if isinstance(result.exception, MegaError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("command", ["train-tokenizer --vocab-size 300", "clean --step whitespace"])
def test_a_damaged_plan_is_refused_by_name(command: str) -> None:
    words = [*command.split(), "--input", "a.jsonl", "--output", "out", "--work-dir", "work"]
    run(*words)
    for content in ("", "[]", '{"inputs', "{}"):
        Path("work/plan.json").write_text(content)
        with pytest.raises(ConfigError, match=r"^work/plan.json: is damaged: found .*; hint: rm -r work, "):
            run(*words)


def test_a_damaged_marker_is_refused_by_name_and_its_task_can_run_again() -> None:
    words = [*TOKENIZER, "--input", "a.jsonl", "--work-dir", "work"]
    run(*words)
    marker = Path("work/done/count/00000.json")
    marker.write_text("")
    with pytest.raises(ConfigError, match=r"00000.json: is damaged: found 0 bytes, .*; hint: rm work/done/"):
        run(*words)
    marker.unlink()
    run(*words)


def test_damaged_counts_train_no_tokenizer() -> None:
    words = [*TOKENIZER, "--input", "a.jsonl", "--work-dir", "work"]
    run(*words)
    total = Path("work/counts/1/00000")
    content = total.read_bytes()
    for damaged_content in (b"", content[:-9], content.replace(b"\t1", b"\t7", 1)):
        total.write_bytes(damaged_content)
        size = len(damaged_content)
        message = f"is damaged: found {size} bytes, CRC-32 .*, wanted {len(content)} bytes, CRC-32 "
        with pytest.raises(ConfigError, match=f"^work/counts/1/00000: {message}"):
            run(*words)
    total.unlink()
    with pytest.raises(ConfigError, match="^work/counts/1/00000: is missing: .*; hint: rm -r work, then run"):
        run(*words)


def test_damaged_counts_are_not_merged() -> None:
    words = [*TOKENIZER, "--input", "a.jsonl", "--work-dir", "work"]
    run(*words, "--stage", "count")
    Path("work/counts/0/00000").unlink()
    with pytest.raises(ConfigError, match="^work/counts/0/00000: is missing"):
        run(*words)
    Path("work/counts/0/00000").write_bytes(b"")
    with pytest.raises(ConfigError, match="^work/counts/0/00000: is damaged: found 0 bytes"):
        run(*words)


def test_hints_name_options_that_the_command_has() -> None:
    Path("wrong.jsonl").write_text('{"text": 5}\n')
    for options in ([], ["--executor", "local"]):
        with pytest.raises(FormatError) as error:
            run(*TOKENIZER, "--input", "wrong.jsonl", *options)
        assert str(error.value).endswith("; hint: correct or delete the line")
    with pytest.raises(FormatError, match=r"wanted 'nokey' \(see --json-key\)"):
        run("train-tokenizer", "--output", "new", "--input", "a.jsonl", "--json-key", "nokey")
    with pytest.raises(ConfigError, match=r"divided into tasks: .*; hint: leave --workers, --memory out$"):
        run(*TOKENIZER, "--input", "-", "--workers", "2", "--memory", "9")


@pytest.mark.parametrize("options", [["--executor", "local"], ["--work-dir", "work"]])
def test_inputs_without_text_leave_nothing_behind(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="^--input: contains no text"):
        run(*TOKENIZER, "--input", "empty.jsonl", *options)
    assert not Path("out").exists()
    assert not Path("work").exists()
    run(*TOKENIZER, "--input", "a.jsonl", *options)


@pytest.mark.parametrize(
    "words",
    [
        ["train-tokenizer", "--stage", "foo"],
        ["train-tokenizer", "--stage", "count:9"],
        ["clean", "--step", "whitespace", "--stage", "00-pass/foo"],
        ["clean", "--step", "whitespace", "--stage", "foo/pass"],
        ["dedup", "--stage", "foo"],
    ],
)
def test_an_unknown_stage_leaves_nothing_behind(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="^--stage: no such "):
        run(*words, "--input", "a.jsonl", "--output", "out")
    assert not Path("out").exists()
