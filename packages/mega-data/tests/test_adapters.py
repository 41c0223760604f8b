"""An adapter converts the rows of any input to documents, in any process."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_data.readers import ranges
from mega_schema.errors import ConfigError, FormatError, MegaError

CODE = '''
from pathlib import Path
NUMBER = 5

def join(row, path):
    """The numbers of two columns; none of rows with an odd first one."""
    if "line" in row.get("text", ""):
        return {"text": row["text"].removeprefix("line ")}
    if int(row["a"]) % 2:
        return None
    return {"text": f"{row['a']} {row['b']} {len(Path(path).suffixes)}", "title": ["1 2", "3"]}

def nothing(row, path):
    return None

def wrong(row, path):
    return {"text": row["a"]} if row["a"] != "4" else 7

def broken(row, path):
    return {"text": str(abs(10 // (int(row["a"]) - 4)))}

def leave(row, path):
    raise SystemExit(3)

def no_text(row, path):
    return {"words": "1"}
'''
STEP = ("--step", "length:minimum=1")
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
ROWS = [{"a": str(n % 50), "b": str(n % 7)} for n in range(60)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The current folder, with a module of adapters whose name no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"adapters_{abs(hash(request.node.name)) % 10**9}"
    (tmp_path / f"{name}.py").write_text(CODE)
    inputs = tmp_path / "in"
    inputs.mkdir()
    lines = b"".join(json.dumps(row).encode() + b"\n\n" for row in ROWS)
    (inputs / "a.jsonl").write_bytes(lines)
    (inputs / "b.jsonl.gz").write_bytes(
        gzip.compress(lines[:400], mtime=0) + gzip.compress(lines[400:], mtime=0)
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), inputs / "c.parquet", row_group_size=20)
    (inputs / "d.csv").write_text("b,a\n" + "".join(f"{row['b']},{row['a']}\n" for row in ROWS))
    (inputs / "e.txt").write_text("line 1\nline 2\n")
    return tmp_path


def module(folder: Path) -> str:
    return next(folder.glob("adapters_*.py")).stem


def call(folder: Path, function: str, *more: str, output: str = "out") -> Result:
    words = ["preprocess", "--input", "in", "--output-prefix", f"{output}/p", *NULL, "--text-unit", "line"]
    return CliRunner().invoke(commands, [*words, "--adapter", f"python:{module(folder)}:{function}", *more])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_adapter_gives_the_documents_of_its_results_in_each_format_and_executor(folder: Path) -> None:
    documents = list[str]()
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.csv"):
        documents += [f"{row['a']} {row['b']} {name.count('.')}" for row in ROWS if int(row["a"]) % 2 == 0]
    adapted = folder / "adapted.jsonl"
    adapted.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*documents, "1", "2"]))
    words = ["preprocess", "--input", str(adapted), "--output-prefix", "plain/p", *NULL]
    assert CliRunner().invoke(commands, words).exit_code == 0
    outputs = list[dict[str, bytes]]()
    for number, more in enumerate(((), ("--executor", "local"), ("--workers", "2"))):
        result = call(folder, "join", *more, output=f"out{number}")
        assert result.exit_code == 0, (result.output, result.exception)
        outputs.append(files(folder / f"out{number}"))
        for suffix in (".bin", ".idx"):
            name = f"p_text_document{suffix}"
            assert outputs[-1][name] == (folder / "plain" / name).read_bytes()
    assert outputs[0] == outputs[1] == outputs[2]
    info = json.loads(outputs[0]["p_text_document.json"])
    assert info["options"]["adapter"] == f"{module(folder)}:join"


def test_texts_under_several_keys_and_sentences_come_from_the_adapter(folder: Path) -> None:
    (folder / "in/e.txt").unlink()
    result = call(folder, "join", "--json-keys", "text", "title")
    assert result.exit_code == 0, (result.output, result.exception)
    assert (folder / "out/p_title_document.bin").exists()


@pytest.mark.parametrize("more", [(), ("--executor", "local")])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "wrong",
            r"in/a.jsonl:9: the adapter \w+:wrong returned another type: found int, wanted a document",
        ),
        (
            "leave",
            r"in/a.jsonl:1: the adapter \w+:leave raised an error: found SystemExit: 3 \(adapters_\d+\.py:",
        ),
        (
            "broken",
            r"in/a.jsonl:9: the adapter \w+:broken raised an error: found ZeroDiv.*\(adapters_\d+\.py:",
        ),
        ("no_text", r"in/a.jsonl:1: no key 'text': found words, wanted 'text' \(see --json-key\)"),
    ],
)
def test_an_error_of_an_adapter_is_named_with_file_and_line(
    function: str, message: str, more: tuple[str, ...], folder: Path
) -> None:
    failed = call(folder, function, *more)
    assert isinstance(failed.exception, FormatError)
    with pytest.raises(FormatError, match=message):
        raise failed.exception


def test_rows_at_which_an_adapter_fails_can_be_skipped_and_a_wrong_type_cannot(folder: Path) -> None:
    (folder / "in/e.txt").unlink()
    for more in ((), ("--executor", "local")):
        result = call(folder, "broken", "--on-error", "skip", *more)
        assert result.exit_code == 0, (result.output, result.exception)
        rows = (folder / "out/p_quarantine.jsonl").read_text().splitlines()
        assert len(rows) == 8  # two rows of each file
        failed = call(folder, "wrong", "--on-error", "skip", *more)
        assert "returned another type" in str(failed.exception)
    none_left = call(folder, "nothing")
    assert none_left.exit_code == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "my_adapters:f",
            "--adapter: not a function: found my_adapters:f, wanted python:MODULE:FUNCTION; hint: ",
        ),
        ("python:f", "--adapter: not a function: found python:f, wanted"),
        ("", "--adapter: not a function: found nothing, wanted"),
        (
            "python:not_there:f",
            "--adapter python:not_there:f: the module cannot be imported: found ModuleNotFoundError",
        ),
        (
            "python:json:no_function",
            "--adapter python:json:no_function: json has no such function: found no_function",
        ),
        ("python:sys:path", "--adapter python:sys:path: sys has no such function: found path"),
    ],
)
def test_what_is_no_function_is_refused_before_anything_is_written(
    value: str, message: str, folder: Path
) -> None:
    words = ["--input", "in", "--adapter", value]
    for command in (
        ["preprocess", "--output-prefix", "out/p", *NULL],
        ["train-tokenizer", "--output", "out"],
    ):
        failed = CliRunner().invoke(commands, [*command, *words])
        assert isinstance(failed.exception, ConfigError)
        assert str(failed.exception).startswith(message)
    assert not (folder / "out").exists()


def test_tasks_of_an_earlier_version_of_the_adapter_are_not_reused(folder: Path) -> None:
    words = ("--executor", "local")
    assert call(folder, "join", *words, "--stage", "encode").exit_code == 0
    path = next(folder.glob("adapters_*.py"))
    path.write_text(path.read_text().replace("{row['a']} {row['b']}", "{row['b']} {row['a']} 7"))
    failed = call(folder, "join", *words, "--stage", "encode")
    assert isinstance(failed.exception, MegaError)
    assert "contains a run with other inputs" in str(failed.exception)
    for prefix in ("out/p", "new/p"):  # in processes of their own, which import the new version
        line = [
            sys.executable,
            "-m",
            "mega_data",
            "preprocess",
            "--input",
            "in",
            "--output-prefix",
            prefix,
            *NULL,
        ]
        line += ["--adapter", f"python:{path.stem}:join", "--text-unit", "line", *words]
        subprocess.run(line, check=True, capture_output=True)
    assert files(folder / "out") == files(folder / "new")


def test_a_tokenizer_is_trained_on_the_adapted_documents(folder: Path) -> None:
    words = ["train-tokenizer", "--input", "in/a.jsonl", "--vocab-size", "300", "--output"]
    plain = CliRunner().invoke(commands, [*words, "out", "--adapter", f"python:{module(folder)}:join"])
    assert plain.exit_code == 0, (plain.output, plain.exception)
    assert isinstance(CliRunner().invoke(commands, [*words, "other"]).exception, FormatError)


def documents(folder: Path, pattern: str = "*.jsonl") -> list[dict[str, object]]:
    lines = [line for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("command", [("clean", *STEP), ("dedup", "--preset", "exact", "--keep-dropped")])
def test_clean_and_dedup_read_the_documents_of_an_adapter(
    command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "in/e.txt").unlink()
    adapter = ("--adapter", f"python:{module(folder)}:join")
    words = [*command, "--input", "in", *adapter, "--output"]
    assert CliRunner().invoke(commands, [*words, "out"]).exit_code == 0
    wanted = [
        {"text": f"{row['a']} {row['b']} {suffixes}", "title": ["1 2", "3"]}
        for suffixes in (1, 2, 1, 1)
        for row in ROWS
        if int(row["a"]) % 2 == 0
    ]
    if command[0] == "dedup":
        texts = dict.fromkeys(str(row["text"]) for row in wanted)
        wanted = [{"text": text, "title": ["1 2", "3"]} for text in texts]
        dropped = documents(folder / "out/dropped")
        assert dropped[0]["dropped"] == "like a.jsonl:1"
    assert documents(folder / "out") == wanted
    split = ranges.split_inputs
    monkeypatch.setattr(ranges, "split_inputs", lambda inputs, _: split(inputs, 300))
    assert CliRunner().invoke(commands, [*words, "parts", "--workers", "2"]).exit_code == 0
    assert files(folder / "parts") == files(folder / "out")


@pytest.mark.parametrize("command", [("clean", *STEP), ("dedup", "--preset", "exact")])
def test_errors_of_an_adapter_in_clean_and_dedup(command: tuple[str, ...], folder: Path) -> None:
    name = module(folder)
    words = [*command, "--input", "in/a.jsonl", "--output", "out", "--adapter"]

    def error(function: str, *more: str) -> str:
        outcome = CliRunner().invoke(commands, [*words, f"python:{name}:{function}", *more])
        assert isinstance(outcome.exception, MegaError), outcome.output
        return str(outcome.exception)

    assert "in/a.jsonl:9: the adapter " in (message := error("broken"))
    assert "raised an error: found ZeroDivisionError" in message
    fatal = error("wrong", "--on-error", "skip")
    assert "in/a.jsonl:9: the adapter " in fatal
    assert "returned another type: found int, wanted a document as a dict, or None" in fatal
    assert "in/a.jsonl:1: no text under 'text': found words" in error("no_text")
    assert "no such function" in error("missing")
    outcome = CliRunner().invoke(commands, [*words, f"python:{name}:broken", "--on-error", "skip"])
    assert outcome.exit_code == 0, outcome.output
    (first, *_) = documents(folder / "out/quarantine", "**/*.jsonl")
    assert first["line"] == 9
    assert first["row"] == "{'a': '4', 'b': '4'}"


def test_a_changed_adapter_does_not_resume_a_deduplication(folder: Path) -> None:
    path = folder / f"{module(folder)}.py"
    words = ["dedup", "--preset", "exact", "--input", "in/a.jsonl", "--output", "out"]
    adapter = ["--adapter", f"python:{path.stem}:join", "--stage", "keys"]
    assert CliRunner().invoke(commands, [*words, *adapter]).exit_code == 0
    path.write_text(f"{CODE}\n")
    outcome = CliRunner().invoke(commands, [*words, *adapter])
    assert "contains a run with other inputs" in str(outcome.exception)
