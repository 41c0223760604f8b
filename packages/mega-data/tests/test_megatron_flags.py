"""Flags of Megatron's preprocess_data.py: accepted if they have a meaning, else refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_schema.errors import ConfigError

NULL = ("NullTokenizer", "--vocab-size", "100")


def call(folder: Path, *flags: str, kind: tuple[str, ...] = NULL) -> Result:
    (folder / "a.jsonl").write_text('{"text": "1 2"}\n')
    words = ["preprocess", "--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "out/p")]
    return CliRunner().invoke(commands, [*words, "--tokenizer-type", *kind, *flags])


def test_flags_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    flags = ["--partitions", "2", "--keep-sequential-samples", "--log-interval", "7"]
    flags += ["--pad-vocab-size-to", "128"]
    flags += ["--make-vocab-size-divisible-by", "8", "--padded-vocab-size", "128", "--use-gigatoken"]
    flags += ["--tokenizer-hf-use-fast", "--null-tokenizer-pad-id", "-1", "--null-tokenizer-eod-id", "100"]
    result = call(tmp_path, *flags)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--trust-remote-code",), "code of a tokenizer's folder is never run; hint: leave it out"),
        (("--tokenizer-hf-no-use-fast",), "ids are those of the fast tokenizer, tokenizer.json; hint:"),
        (("--tokenizer-metadata", "m.json"), "names classes of Megatron; hint: --tokenizer-type"),
        (("--tokenizer-sentencepiece-legacy",), "special tokens in a text are not parsed"),
        (("--tokenizer-sentencepiece-ignore-extra-whitespaces",), "the SentencePiece model itself decides"),
        (("--find-optimal-num-workers",), "the number of workers is not searched for; hint: --workers"),
        (("--workers-to-check", "4", "8"), "the number of workers is not searched for"),
        (("--max-documents", "100"), "the number of workers is not searched for"),
        (("--null-tokenizer-eod-id", "7"), "not the eod: found 7, wanted the value of"),
        (("--tokenizer-special-tokens", "<a>", "<b>"), "are in the files of a NullTokenizer: found <a> <b>"),
    ],
)
def test_flags_without_a_meaning_are_refused_with_the_reason(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    failed = call(tmp_path, *flags)
    assert isinstance(failed.exception, ConfigError)
    assert str(failed.exception).startswith(f"{flags[0]}: {message}")
    assert not (tmp_path / "out").exists()


def test_special_tokens_of_a_tiktokenizer_have_two_names(tmp_path: Path) -> None:
    tokens = [*(bytes([n]) for n in range(256)), b"ab"]
    texts = (base64.b64encode(token).decode() for token in tokens)
    vocab = [{"rank": n, "token_bytes": text, "token_str": ""} for n, text in enumerate(texts)]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    kind = ("TikTokenizer", "--tokenizer-model", str(tmp_path / "vocab.json"), "--tiktoken-pattern", "v2")
    size = ("--vocab-size", "267", "--tiktoken-num-special-tokens", "10")
    identities = list[str]()
    for flag in ("--tiktoken-special-tokens", "--tokenizer-special-tokens"):
        result = call(tmp_path, *size, flag, "<unk>", "<s>", "</s>", "<mask>", kind=kind)
        assert result.exit_code == 0, (result.output, result.exception)
        identities.append(read_hash(tmp_path))
    assert call(tmp_path, *size, kind=kind).exit_code == 0
    assert identities[0] == identities[1] != read_hash(tmp_path)


def read_hash(folder: Path) -> str:
    info = json.loads((folder / "out/p_text_document.json").read_bytes())
    return str(info["tokenizer"]["sha256"])
