"""Options that do not fit each other are refused before anything is written or removed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_data.clean.registry import step_from_flag, steps_from_toml
from mega_data.cli import commands
from mega_data.readers.inputs import expand_inputs
from mega_schema.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "one two"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("", "--step: has no name: found '', wanted NAME or NAME:KEY=VALUE"),
        (":minimum=1", "--step: has no name: found ':minimum=1'"),
        ("language:score=8", "--step language: score: wrong value: found 8.0, wanted a share from 0 to 1"),
        ("fineweb-quality:short_line_thr=1.5", "short_line_thr: wrong value: found 1.5, wanted a share"),
        ("duplicates:preset=megatron,jaccard=7", "--step duplicates: jaccard: wrong value: found 7.0"),
        (
            "length:minimum=10,maximum=2",
            "--step length: minimum: wrong value: found 10, wanted at most 2, the value of maximum",
        ),
        ("gopher-quality:fewest=90,most=9", "fewest: wrong value: found 90, wanted at most 9"),
        ("decontaminate:shortest=14", "shortest: wrong value: found 14, wanted at most 13"),
        ("length:minimum=1,minimum=2", "--step length: minimum: is given twice: found 1 and 2; hint: + "),
    ],
)
def test_a_wrong_step_is_refused_with_its_option(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        step_from_flag(flag)
    assert message in str(refused.value)


def test_limits_that_fit_are_accepted() -> None:
    open_end, one_length = (
        step_from_flag(f"length:{limits}").step for limits in ("minimum=10", "minimum=10,maximum=10")
    )
    assert (open_end.minimum, open_end.maximum) == (10, 0)
    assert (one_length.minimum, one_length.maximum) == (10, 10)
    assert step_from_flag("language:score=1").step.score == 1
    assert step_from_flag("gopher-quality").name == "gopher-quality"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('nam = "length"', 'c.toml: step 1: has no name: found nam, wanted name = "length"; hint: did you'),
        ("", "c.toml: step 1: has no name: found an empty table"),
        ('name = "length"\nminimum = 3\nmaximum = 2', "c.toml: step 1: minimum: wrong value: found 3"),
    ],
)
def test_a_wrong_table_of_a_step_is_refused_with_its_number(table: str, message: str) -> None:
    Path("c.toml").write_text(f"[[step]]\n{table}\n")
    with pytest.raises(ConfigError) as refused:
        steps_from_toml(Path("c.toml"))
    assert message in str(refused.value)


def write_pipeline(stage: str) -> None:
    first = '[[stage]]\nname = "first"\ncommand = "clean"\ninput = "a.jsonl"\nstep = ["whitespace"]\n'
    Path("p.toml").write_text(f'output = "corpus"\n{first}[[stage]]\n{stage}\n')


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ('name = "a b"', "p.toml: stage a b: name: not a name: found 'a b', wanted letters, digits, - and _"),
        ('nam = "b"', 'p.toml: stage 2: has no name: found nam, wanted name = "clean"'),
        (
            'name = "b"\ncommand = "clean"\ninput = "{first}"\nstep = ["length:minimum=3,maximum=2"]',
            "p.toml: stage b: --step length: minimum: wrong value",
        ),
        (
            'name = "b"\ncommand = "clean"\ninput = "{first}"\nstep = ["perplexity"]',
            "p.toml: stage b: step perplexity: model: ",
        ),
        ('name = "b"\ncommand = "clean"\ninput = "{first}"', "p.toml: stage b: --step: no step"),
        (
            'name = "b"\ncommand = "clean"\ninput = "{first}"\nstep = ["whitespace"]\nmax-errors = 3',
            "p.toml: stage b: --max-errors: has no effect without --on-error skip",
        ),
        (
            'name = "b"\ncommand = "dedup"\ninput = "{first}"\npreset = "exact"\njaccard = 0.5',
            "p.toml: stage b: --jaccard: has no effect on exact duplicates",
        ),
        (
            'name = "b"\ncommand = "dedup"\ninput = "{first}"\nmin-tokens = 60',
            "p.toml: stage b: --min-tokens: has no effect on whole documents",
        ),
        (
            'name = "b"\ncommand = "train-tokenizer"\ninput = "{first}"\ntype = "unigram"\nworkers = 2',
            "p.toml: stage b: --workers: does not fit --type unigram",
        ),
        (
            'name = "b"\ncommand = "train-tokenizer"\ninput = "{first}"\nvocab-size = 7',
            "p.toml: stage b: --vocab-size: too small for byte-level BPE: found 7",
        ),
    ],
)
def test_a_wrong_stage_is_refused_before_the_stages_before_it_start(stage: str, message: str) -> None:
    write_pipeline(stage)
    for options in ([], ["--dry-run"]):
        outcome = CliRunner().invoke(commands, ["run", "p.toml", *options])
        assert message in str(outcome.exception), outcome.output
        assert not Path("corpus").exists()


def test_the_output_of_a_stage_whose_new_options_are_wrong_stays() -> None:
    write_pipeline('name = "b"\ncommand = "clean"\ninput = "{first}"\nstep = ["length:minimum=1"]')
    outcome = CliRunner().invoke(commands, ["run", "p.toml"])
    assert outcome.exit_code == 0, outcome.output
    assert "report.html: 2 stages" in outcome.output
    write_pipeline('name = "b"\ncommand = "clean"\ninput = "{first}"\nstep = ["length:minimum=1,minimum=2"]')
    outcome = CliRunner().invoke(commands, ["run", "p.toml"])
    assert "minimum: is given twice" in str(outcome.exception)
    assert b"one two" in Path("corpus/b/a.jsonl").read_bytes()


def test_one_document_and_one_stage_are_singular() -> None:
    outcome = CliRunner().invoke(commands, ["dedup", "--input", "a.jsonl", "--output", "out"])
    assert "kept 1 of 1 document," in outcome.output
    stage = '[[stage]]\nname = "a"\ncommand = "clean"\ninput = "a.jsonl"\nstep = ["whitespace"]\n'
    Path("p.toml").write_text(f'output = "corpus"\n{stage}')
    assert CliRunner().invoke(commands, ["run", "p.toml"]).output.endswith("report.html: 1 stage\n")


@pytest.mark.parametrize("ending", [".gz", ".zst", ".xz", ".bz2", ".lz4"])
def test_a_compressed_file_of_no_bytes_is_noted(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    Path(f"b.jsonl{ending}").write_bytes(b"")
    Path("empty.jsonl").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "mega.data"):
        expand_inputs([f"b.jsonl{ending}", "empty.jsonl"])
    assert caplog.messages == [
        f"b.jsonl{ending}: 0 bytes, not even the header of {ending}: read as no document"
    ]
