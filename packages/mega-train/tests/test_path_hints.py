"""A --data-path without a dataset: the error suggests similar paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_train.config import DataConfig
from mega_train.data.datasets import Datasets
from mega_train.data.path_hints import suggest


def _refusal(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        Datasets.open(DataConfig(path=(str(path),)))
    return str(caught.value)


def test_a_text_file_is_told_to_be_preprocessed(tmp_path: Path) -> None:
    text = tmp_path / "corpus.jsonl.zst"
    text.write_bytes(b"")
    prefix = tmp_path / "corpus"
    command = f"mega-data preprocess --input {text} --output-prefix {prefix} --tokenizer-type TYPE"
    assert _refusal(text) == (
        f"{text}.idx: no such file; hint: {text} is a file, not the prefix of a dataset: {command}, "
        f"then --data-path {prefix}_text_document"
    )


def test_a_prefix_without_its_ending_and_a_misspelt_one_name_the_dataset(corpus: Path) -> None:
    without = corpus.with_name("toy")
    assert _refusal(without) == f"{without}.idx: no such file; hint: did you mean {corpus}?"
    assert suggest(corpus.with_name("toi_text_document")) == f"did you mean {corpus}?"
    assert suggest(corpus.with_name("something-else")) == f"datasets in {corpus.parent}: {corpus}"


def test_a_folder_lists_its_datasets(corpus: Path, tmp_path: Path) -> None:
    assert suggest(corpus.parent) == f"datasets in this folder: {corpus}"
    assert suggest(tmp_path) == "a folder without datasets; mega-data preprocess makes one of text"
    for name in "abcde":
        (tmp_path / f"{name}.idx").touch()
    assert suggest(tmp_path).endswith("c and 2 more")


def test_a_path_in_no_folder_and_one_in_an_empty_folder_are_no_folders_without_datasets(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "no" / "such"
    assert _refusal(missing) == f"{missing}.idx: no such file; hint: there is no folder {missing.parent}"
    alone = tmp_path / "nosuch"
    assert _refusal(alone) == f"{alone}.idx: no such file"


def test_the_working_folder_and_an_empty_word_are_no_prefixes(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    assert _refusal(Path()) == (
        f".: is a folder, not the prefix of a dataset; hint: datasets in this folder: {corpus.name}"
    )
    with pytest.raises(ConfigError) as caught:
        Datasets.open(DataConfig(path=("0.5", "", "0.5", str(corpus))))
    assert str(caught.value) == (
        "--data-path: has an empty word: wanted a prefix; hint: is a shell variable unset?"
    )


def test_an_index_that_is_damaged_keeps_its_own_error(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.idx").write_bytes(b"MMID")
    (tmp_path / "cut.bin").write_bytes(b"")
    assert "did you mean" not in _refusal(tmp_path / "cut")
