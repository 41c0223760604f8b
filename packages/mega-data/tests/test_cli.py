"""The commands, from text to a dataset, and their error messages."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mega_data import __version__
from mega_data.cli import commands
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder


def call(*words: object) -> str:
    """stdout of a command that ends well."""
    result = CliRunner().invoke(commands, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line on stderr of a command that ends with 2."""
    with pytest.raises(SystemExit) as exit_error:
        run_command(commands, [str(word) for word in words])
    out, err = capsys.readouterr()
    assert (exit_error.value.code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def test_from_nothing_to_a_verified_dataset(tmp_path):
    corpus, held_out = tmp_path / "corpus.jsonl", tmp_path / "held-out.jsonl"
    output = call(
        *(
            "sample",
            "--output",
            corpus,
            "--held-out",
            held_out,
            "--megabytes",
            0.2,
            "--held-out-fraction",
            0.2,
        ),
        *("--workers", 1),
    )
    assert re.fullmatch(r".*corpus.jsonl: \d+ documents, 0.2\d MB\n.*held-out.jsonl: .* MB\n", output)
    train, held_out_prefix = (
        [json.loads(line)["text"] for line in path.read_bytes().splitlines()] for path in (corpus, held_out)
    )
    assert held_out_prefix
    assert not {*train} & {*held_out_prefix}
    output = call("train-tokenizer", "--input", corpus, "--vocab-size", 400, "--output", tmp_path / "tok")
    assert "400 ids, eod 0" in output
    model = (
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tmp_path / "tok",
        "--append-eod",
    )
    output = call("preprocess", "--input", corpus, held_out, "--output-prefix", tmp_path / "p", *model)
    assert re.search(
        r"p_text_document: [\d,]+ documents, [\d,]+ tokens, [\d,]+ bytes, [\d.]+ MB/s\n$", output
    )
    prefix = tmp_path / "p_text_document"
    data, tokenizer = IndexedDataset(prefix), open_tokenizer_folder(tmp_path / "p_text_document.tokenizer")
    assert len(data) == len(train + held_out_prefix)
    texts = train + held_out_prefix
    for i in (0, len(data) // 2, len(data) - 1):
        assert tokenizer.decode(data[i]) == texts[i] + "<|endoftext|>"
    output = call("inspect", prefix, "--documents", 2)
    assert f"{len(data):,} documents (0 empty)" in output
    assert f"document 1  {json.dumps(texts[1][:200], ensure_ascii=False)}" in output
    assert "document 2" not in output
    assert "ids below 400" in call("verify", prefix)


def test_several_words_after_an_option_are_several_values(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text('{"x": "1", "y": "2"}\n', "utf-8")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 9)
    inputs = ("--input", tmp_path / "a", tmp_path / "b", "--input", tmp_path / "c")
    call("preprocess", *inputs, "--json-keys", "x", "y", *null, "--output-prefix", tmp_path / "p")
    assert [len(IndexedDataset(tmp_path / f"p_{key}_document")) for key in "xy"] == [3, 3]
    inputs = (f"--input={tmp_path / 'a'}", tmp_path / "b")
    call("preprocess", *inputs, "--json-keys=x", *null, "--output-prefix", tmp_path / "q")
    assert len(IndexedDataset(tmp_path / "q_x_document")) == 2


def test_an_option_of_several_words_needs_one(tmp_path, capsys):
    line = refusal(capsys, "preprocess", "--input", "--output-prefix", tmp_path / "p")
    assert line == "error: --input: needs a value\n"


def test_a_wrong_line_is_one_line_on_stderr_and_leaves_nothing(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\nnonsense\n', "utf-8")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--output-prefix", tmp_path / "p")
    line = refusal(capsys, "preprocess", "--input", path, *null)
    assert line.startswith(f"error: {path}:2: not JSON: found ")
    assert list(tmp_path.iterdir()) == [path]
    line = refusal(capsys, "train-tokenizer", "--input", path, "--output", tmp_path / "t")
    assert line.startswith(f"error: {path}:2: not JSON")
    assert list(tmp_path.iterdir()) == [path]


def test_a_fault_in_a_dataset_is_one_line_on_stderr(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2 3"}\n', "utf-8")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--output-prefix", tmp_path / "p")
    call("preprocess", "--input", path, *null)
    payload = tmp_path / "p_text_document.bin"
    payload.write_bytes(b"\1\0\2\0\x77\0")
    line = refusal(capsys, "verify", tmp_path / "p_text_document")
    fault = f"error: {payload}: token 2 of sequence 0: found 119, wanted 0 to 9, the vocabulary"
    assert line == f"{fault}; hint: the file was cut off or written to; copy or preprocess it again\n"
    payload.write_bytes(b"\1\0\2\0")
    for command in ("verify", "inspect"):
        assert f"{payload}: size in bytes: found 4, wanted 6" in refusal(
            capsys, command, tmp_path / "p_text_document"
        )


def test_flags_that_do_not_fit_are_refused(tmp_path, capsys):
    (tmp_path / "a").write_text('{"text": "1"}\n', "utf-8")
    words = ("preprocess", "--input", tmp_path / "a", "--output-prefix", tmp_path / "p", "--tokenizer-type")
    assert "--tokenizer-type: unknown: found Nulltokenizer" in refusal(capsys, *words, "Nulltokenizer")
    assert "--tokenizer-model: missing" in refusal(capsys, *words, "HuggingFaceTokenizer")
    message = refusal(capsys, "preprocess", "--input", tmp_path / "nothing", *words[3:], "NullTokenizer")
    assert "--input: no files there: found " in message
    assert "unexpected" in refusal(capsys, *words, "NullTokenizer", "stray").lower()


def test_a_sample_that_is_smaller_than_asked_says_how_small(tmp_path, monkeypatch):
    from mega_data import python_docs_corpus

    (tmp_path / "m.py").write_text(f'"""{"text " * 40}"""', "utf-8")
    monkeypatch.setattr(python_docs_corpus, "_own_roots", lambda: [tmp_path])
    words = ["sample", "--output", str(tmp_path / "c.jsonl"), "--workers", "1"]
    result = CliRunner().invoke(commands, words, catch_exceptions=False)
    assert "1 document, 0.00 MB" in result.stdout
    assert result.stderr == "note: 10 MB were requested; this Python has no more text\n"


def test_the_version_is_printed():
    assert call("--version") == f"mega-data, version {__version__}\n"


def test_help_needs_no_heavy_library():
    code = (
        "import sys, mega_data.cli; print(sorted({'numpy', 'tokenizers', 'rich', 'orjson'} & {*sys.modules}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"
    for words in ([], ["--help"], ["preprocess", "-h"]):
        program = [sys.executable, "-m", "mega_data", *words]
        process = subprocess.run(program, capture_output=True, text=True, check=False)
        assert (process.returncode, "Usage: " in process.stdout + process.stderr) == (0 if words else 2, True)


def test_the_progress_bar_is_on_stderr_where_it_is_a_terminal(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"text": "1"}\n' * 100, "utf-8")
    words = ["preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "p")]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    ours, theirs = pty.openpty()
    try:
        process = subprocess.run(
            [sys.executable, "-m", "mega_data", *words],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
            check=True,
        )
        shown = os.read(ours, 1 << 16)
        assert b"encoding" in shown
        assert b"100 documents" in shown
        assert process.stdout.count(b"\n") == 1
    finally:
        os.close(ours)
        os.close(theirs)
