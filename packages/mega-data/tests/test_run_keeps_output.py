"""A stage of a pipeline that begins anew loses its finished output only when the new one is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_data.stage_graph import stage_runs
from mega_schema.errors import MegaError

PIPELINE = """
output = "corpus"

[[stage]]
name = "unique"
command = "dedup"
input = "a.jsonl"
preset = "exact"

[[stage]]
name = "ids"
command = "preprocess"
input = "{unique}"
tokenizer-type = "NullTokenizer"
vocab-size = 100
"""
EARLIER = Path("corpus/.unique.earlier")
RECORD = Path("corpus/.pipeline/unique.json")
EARLIER_RECORD = Path("corpus/.pipeline/.unique.earlier.json")
Call = Callable[[list[str], Path, Callable[[str], object]], tuple[int, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished pipeline."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "1 2"}\n{"text": "1 2"}\n')
    replace_command(monkeypatch, run_here)
    assert run().exit_code == 0
    return tmp_path


def run(old: str = "", new: str = "") -> Result:
    Path("p.toml").write_text(PIPELINE.replace(old, new) if old else PIPELINE)
    return CliRunner().invoke(commands, ["run", "p.toml"])


def contents(name: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path("corpus", name).rglob("*") if path.is_file()}


def run_here(arguments: list[str], counts: Path, echo: Callable[[str], object]) -> tuple[int, str]:
    """Run a command in this process."""
    result = CliRunner().invoke(commands, ["--result-file", str(counts), *arguments])
    return 2 if isinstance(result.exception, MegaError) else result.exit_code, result.stdout


def replace_command(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(stage_runs, "_run_command", call)


def state(name: str) -> str:
    stages = json.loads(Path("corpus/report.json").read_text())["stages"]
    return next(stage["state"] for stage in stages if stage["name"] == name)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("unique", 'preset = "exact"', 'preset = "exact"\nagainst = "nofolder"'),
        ("ids", '"NullTokenizer"', '"HuggingFaceTokenizer"\ntokenizer-model = "nofolder"'),
    ],
)
def test_a_stage_whose_options_its_command_refuses_keeps_its_output(name: str, old: str, new: str) -> None:
    files = contents(name)
    outcome = run(old, new)
    assert outcome.exit_code == 2
    assert f"note: corpus/{name}: the earlier output is there" in outcome.output
    assert contents(name) == files
    assert state(name) == "failed, exit code 2; the earlier output is there"
    assert not [*Path("corpus").glob(".*.earlier"), *Path("corpus/.pipeline").glob(".*.earlier.json")]
    outcome = run()
    assert outcome.exit_code == 0
    assert f"{name}: unchanged" in outcome.output


def test_the_earlier_output_goes_when_the_new_one_is_complete() -> None:
    outcome = run('preset = "exact"', 'preset = "megatron"')
    assert outcome.exit_code == 0, outcome.output
    assert not EARLIER.exists()
    assert not EARLIER_RECORD.exists()
    assert contents("unique")


def test_a_stage_that_is_killed_resumes_and_its_earlier_output_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    files = contents("unique")

    def end_early(arguments: list[str], counts: Path, echo: Callable[[str], object]) -> tuple[int, str]:
        Path("corpus/unique/.work").mkdir(exist_ok=True)
        return -9, ""

    replace_command(monkeypatch, end_early)
    assert run('preset = "exact"', 'preset = "megatron"').exit_code != 0
    earlier = {path.replace("unique", ".unique.earlier", 1): text for path, text in files.items()}
    assert contents(".unique.earlier") == earlier
    # other options, of another run that ends early: the finished output stays, the unfinished one goes
    assert run('preset = "exact"', 'preset = "datatrove"').exit_code != 0
    assert contents(".unique.earlier") == earlier

    def refuse(arguments: list[str], counts: Path, echo: Callable[[str], object]) -> tuple[int, str]:
        return 2, ""

    replace_command(monkeypatch, refuse)
    assert run('preset = "exact"', 'preset = "datatrove"').exit_code == 2
    assert contents("unique") == files
    replace_command(monkeypatch, run_here)
    assert "unique: unchanged" in run().output


def test_a_command_that_wrote_a_file_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(arguments: list[str], counts: Path, echo: Callable[[str], object]) -> tuple[int, str]:
        Path("corpus/unique/part").write_text("1")
        return 2, ""

    replace_command(monkeypatch, write)
    assert run('preset = "exact"', 'preset = "megatron"').exit_code == 2
    assert Path("corpus/unique/part").exists()
    assert EARLIER.is_dir()
    assert state("unique") == "failed, exit code 2"


def test_a_kill_while_outputs_are_moved_loses_none() -> None:
    # before the record followed its folder aside
    Path("corpus/unique").rename(EARLIER)
    assert run('preset = "exact"', 'preset = "exact"\nagainst = "nofolder"').exit_code == 2
    assert contents("unique")
    # before the folder followed its record back
    Path("corpus/unique").rename(EARLIER)
    assert run().exit_code == 0
    assert contents("unique")
    assert not EARLIER.exists()
