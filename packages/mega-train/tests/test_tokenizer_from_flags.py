"""Tokenizers from flags, for Megatron's datasets, which do not record their tokenizer."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder
from mega_train.cli import main
from mega_train.config import RunConfig
from mega_train.data.tokenizer_from_flags import open_tokenizer_from_flags

SMALL = [
    *("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"),
    *("--eval-iters", "0", "--eod-mask-loss"),
]


def _megatrons(prefix: Path) -> Path:
    """A dataset without a .json beside it, whose documents end with 32."""
    with IndexedWriter(prefix, np.uint16) as out:
        for begin in range(20):
            out.add([*range(begin, begin + 10), 32])
            out.end_document()
    return prefix


def _gpt(*argv: object, code: int = 0) -> str:
    """What the command says, on stdout or as its error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["gpt", *SMALL, *map(str, argv)])
    assert left.value.code == code, err.getvalue()
    return (err if code else out).getvalue()


def test_a_named_tokenizer_tells_the_vocabulary_and_the_end_of_documents_and_goes_with_checkpoints(
    tmp_path: Path,
) -> None:
    run, data = tmp_path / "run", _megatrons(tmp_path / "theirs")
    flags = "--tokenizer-type", "NullTokenizer", "--vocab-size", 32
    assert "the end-of-document token is not known" in _gpt("--data-path", data, *flags[2:], code=2)
    _gpt("--data-path", data, *flags, "--save", run)
    (saved,) = run.glob("iter_*")
    assert json.loads((saved / "manifest.json").read_text())["model"]["vocab"] == 33
    assert open_tokenizer_folder(saved / "tokenizer").identity.eod == 32


def test_a_tokenizer_that_did_not_make_the_data_is_refused(corpus: Path) -> None:
    line = _gpt("--data-path", corpus, "--tokenizer-type", "NullTokenizer", "--vocab-size", 31, code=2)
    assert line.startswith("error: --tokenizer-type: is not the tokenizer of the data: found ")
    assert line.endswith("; hint: leave it out: the data records its tokenizer\n")
    _gpt("--data-path", corpus, "--tokenizer-type", "NullTokenizer", "--vocab-size", 32)


def _run(**values: Any) -> RunConfig:
    return load_config(RunConfig, None, {key: str(value) for key, value in values.items()})


def test_a_tokenizer_is_made_of_the_files_that_megatrons_flags_name(tmp_path: Path) -> None:
    vocabulary = {letter: i for i, letter in enumerate([*"ab", "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    run, tokenizer = open_tokenizer_from_flags(
        _run(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=tmp_path / "vocab.json",
            merge_file=tmp_path / "merges.txt",
        )
    )
    assert tokenizer is not None
    assert (tokenizer.encode("aba"), tokenizer.identity.eod) == ([2, 0], 3)
    assert run.model.vocab is None, "the tokenizer's is taken where the model is made"


def test_files_without_a_type_and_two_names_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        open_tokenizer_from_flags(_run(vocab_file="v"))
    assert str(caught.value) == (
        "--tokenizer-type: missing, and only --vocab-file with --merge-file has a default, GPT2BPETokenizer: "
        "wanted Megatron's name of the tokenizer; "
        "hint: --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"
    )
    with pytest.raises(ConfigError) as caught:
        open_tokenizer_from_flags(
            _run(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="a", tokenizer_name_or_path="b")
        )
    assert str(caught.value) == (
        "--tokenizer-name-or-path: excludes --tokenizer-model: found both, wanted one of them"
    )
    with pytest.raises(ConfigError, match=r"^--vocab-size: missing, and required by NullTokenizer"):
        open_tokenizer_from_flags(_run(tokenizer_type="NullTokenizer"))
