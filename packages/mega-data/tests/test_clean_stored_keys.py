"""A step that stores a value never overwrites the text or the id of a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands

MODEL = """\\data\\
ngram 1=4

\\1-grams:
-1\t<unk>
-99\t<s>
-1\t</s>
-1\tcat

\\end\\
"""
PERPLEXITY = "perplexity:model=small.arpa,head=3,tail=9"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.arpa").write_text(MODEL)
    Path("a.jsonl").write_text('{"text": "cat", "id": "1", "meta": {"text": "cat", "id": "2"}}\n')
    return tmp_path


def clean(step: str, *options: str) -> Result:
    words = ["clean", "--input", "a.jsonl", "--output", "out", "--step", step, *options]
    return CliRunner().invoke(commands, words)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (
            f"{PERPLEXITY},store=text",
            (),
            "perplexity: store: is the key of the text (--json-key): found text",
        ),
        (f"{PERPLEXITY},bucket=text", (), "perplexity: bucket: is the key of the text (--json-key): found"),
        ("language:store=text", (), "language: store: is the key of the text (--json-key): found text"),
        ("classifier:store=text", (), "classifier: store: is the key of the text (--json-key): found text"),
        (
            "language:store=meta",
            ("--json-key", "meta.text"),
            "language: store: is the key of the object around the text (--json-key): found meta; hint: name",
        ),
        (
            "language:store=meta.text",
            ("--json-key", "meta.text"),
            "store: is the key of the text (--json-key",
        ),
        ("language:store=id", ("--id-key", "id"), "store: is the key of the id (--id-key): found id"),
        ("language:store=meta", ("--id-key", "meta.id"), "store: is the key of the object around the id ("),
        (
            f"{PERPLEXITY},store=p,bucket=p",
            (),
            "store: overwrites bucket: found p, wanted a key beside p, wh",
        ),
        (f"{PERPLEXITY},store=meta.p,bucket=meta", (), "bucket: overwrites store: found meta, wanted a key"),
        (f"{PERPLEXITY},store=text.score,bucket=b", (), ""),
        (f"{PERPLEXITY},store=meta.score,bucket=meta.bucket", ("--json-key", "meta.text"), ""),
    ],
)
def test_a_stored_value_replaces_neither_text_nor_id(
    step: str, options: tuple[str, ...], message: str
) -> None:
    outcome = clean(step, *options)
    if message:
        assert message in str(outcome.exception), outcome.output
        assert not Path("out").exists()
    else:
        assert outcome.exit_code == 0, (outcome.output, outcome.exception)
        values = json.loads(Path("out/a.jsonl").read_text())
        assert (values["text"], values["meta"]["text"], values["id"]) == ("cat", "cat", "1")


@pytest.mark.parametrize(("key", "stored_key"), [("text", "text"), ("meta.text", "meta")])
def test_a_pipeline_refuses_such_a_step_before_it_starts(key: str, stored_key: str) -> None:
    stage = f'input = "a.jsonl"\nstep = ["{PERPLEXITY},store={stored_key}"]\njson-key = "{key}"\n'
    Path("p.toml").write_text(f'output = "corpus"\n[[stage]]\nname = "b"\ncommand = "clean"\n{stage}')
    for options in ([], ["--dry-run"]):
        outcome = CliRunner().invoke(commands, ["run", "p.toml", *options])
        assert "p.toml: stage b: step perplexity: store: is the key of the " in str(outcome.exception)
        assert not Path("corpus").exists()
