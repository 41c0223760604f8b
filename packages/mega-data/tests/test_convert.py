"""Conversions between all dataset formats and to text are lossless, except for reported losses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.preprocess import Options, preprocess
from mega_data.train_tokenizer import train
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import INDEX_FORMATS, DatasetInfo, IndexedDataset, IndexedWriter
from mega_schema.tokenizer.tokenizer import open_tokenizer

DOCS = [[[1, 2], [3]], [], [[65000]], [[5, 6, 7], [], [8]]]
FLAT = [[sequence] for doc in DOCS for sequence in doc]


def dataset(
    prefix: Path, form: str, dtype: str = "int32", info: DatasetInfo | None = None, **options
) -> None:
    with IndexedWriter(prefix, dtype, info, index_format=form, **options) as writer:
        for doc in DOCS:
            for sequence in doc:
                writer.add(sequence)
            writer.end_document()


def back(prefix: Path) -> list[list[list[int]]]:
    data = IndexedDataset(prefix)
    bounds = data.documents.tolist()
    return [[data[i].tolist() for i in range(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)]


def call(*words: object) -> tuple[str, str]:
    result = CliRunner().invoke(commands, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as exit_error:
        run_command(commands, [str(word) for word in words])
    out, err = capsys.readouterr()
    assert (exit_error.value.code, out) == (2, "")
    return err


@pytest.mark.parametrize(("first_format", "two"), [*itertools.product(INDEX_FORMATS, INDEX_FORMATS)])
def test_any_form_becomes_any_other(first_format, two, tmp_path):
    identity = open_tokenizer("NullTokenizer", vocab_size=65400).identity
    dataset(tmp_path / "a", first_format, info=DatasetInfo(identity))
    documents = FLAT if "fairseq" in first_format + two else DOCS
    _, note = call(
        "convert", tmp_path / "a", "--from", first_format, "--to", two, "--output-prefix", tmp_path / "b"
    )
    assert ("fairseq's formats have no documents" in note) == (
        "fairseq" in two and "fairseq" not in first_format
    )
    assert back(tmp_path / "b") == documents
    assert IndexedDataset(tmp_path / "b").index_format == two
    call("verify", tmp_path / "b")
    dataset(tmp_path / "c", two, info=DatasetInfo(identity))
    if documents is DOCS or "fairseq" in two:
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"b{suffix}").read_bytes() == (tmp_path / f"c{suffix}").read_bytes()


def test_lazy_is_another_name_of_cached(tmp_path):
    dataset(tmp_path / "a", "mmap")
    call("convert", tmp_path / "a", "--to", "lazy", "--output-prefix", tmp_path / "b")
    assert IndexedDataset(tmp_path / "b").index_format == "cached"
    call("convert", tmp_path / "b", "--from", "lazy", "--output-prefix", tmp_path / "c")
    assert back(tmp_path / "c") == DOCS


def test_ids_get_another_dtype_or_the_first_that_does_not_fit_is_named(tmp_path, capsys):
    dataset(tmp_path / "a", "mmap")
    call("convert", tmp_path / "a", "--dtype", "uint16", "--output-prefix", tmp_path / "b")
    assert (back(tmp_path / "b"), IndexedDataset(tmp_path / "b").dtype) == (DOCS, np.uint16)
    call("convert", tmp_path / "b", "--to", "fairseq-cached", "--output-prefix", tmp_path / "c")
    assert (back(tmp_path / "c"), IndexedDataset(tmp_path / "c").dtype) == (FLAT, np.int32)
    files_before = sorted(tmp_path.iterdir())
    line = refusal(capsys, "convert", tmp_path / "a", "--dtype", "int16", "--output-prefix", tmp_path / "d")
    assert f"error: {tmp_path}/a.bin: ids: found 1 to 65000, wanted -32768 to 32767, which int16" in line
    line = refusal(capsys, "convert", tmp_path / "a", "--from", "cached", "--output-prefix", tmp_path / "d")
    assert line == f"error: {tmp_path}/a.idx: index format: found mmap, wanted cached; hint: --from auto\n"
    assert sorted(tmp_path.iterdir()) == files_before


def test_fairseqs_wide_ids_become_megatrons_where_they_fit(tmp_path, capsys):
    dataset(tmp_path / "a", "fairseq-mmap", "uint32")
    call("convert", tmp_path / "a", "--output-prefix", tmp_path / "b")
    assert (back(tmp_path / "b"), IndexedDataset(tmp_path / "b").dtype) == (FLAT, np.int32)
    with IndexedWriter(tmp_path / "c", "uint32", index_format="fairseq-mmap") as writer:
        writer.add([2**31])
        writer.end_document()
    line = refusal(capsys, "convert", tmp_path / "c", "--output-prefix", tmp_path / "d")
    assert "c.bin: ids: found 2147483648 to 2147483648, wanted -2147483648 to 2147483647, which int32" in line


def test_text_comes_back_as_it_was(tmp_path, capsys):
    texts = ['say "hi"\n', "", "日本語 🎉\u0000", "<|endoftext|>", "x" * 3000]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    train(texts, 300).save(tmp_path / "tok")
    tokenizer = open_tokenizer("HuggingFaceTokenizer", model=tmp_path / "tok")
    preprocess([path], tmp_path / "p", tokenizer, Options(append_eod=True))
    prefix, out = tmp_path / "p_text_document", tmp_path / "new" / "b.jsonl"
    output, _ = call("convert", prefix, "--to", "jsonl", "--output", out, "--json-key", "content")
    assert output == f"{out}: 5 documents from mmap\n"
    assert [json.loads(line)["content"] for line in out.read_bytes().splitlines()] == texts
    IndexedDataset(prefix)  # the tokenizer is not beside the next
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"bare{suffix}").write_bytes((tmp_path / f"p_text_document{suffix}").read_bytes())
    line = refusal(capsys, "convert", tmp_path / "bare", "--to", "jsonl", "--output", tmp_path / "c")
    assert "--to jsonl: needs the tokenizer of the ids: found no " in line
    words = ("--tokenizer-model", tmp_path / "tok")
    call("convert", tmp_path / "bare", "--to", "jsonl", "--output", tmp_path / "c", *words)
    assert [json.loads(line)["text"] for line in (tmp_path / "c").read_bytes().splitlines()] == texts


def test_a_token_outside_the_vocabulary_has_no_text_and_leaves_no_file(tmp_path, capsys):
    dataset(tmp_path / "a", "mmap", info=DatasetInfo(open_tokenizer("NullTokenizer", vocab_size=9).identity))
    open_tokenizer("NullTokenizer", vocab_size=9).save(tmp_path / "a.tokenizer")
    files_before = sorted(tmp_path.iterdir())
    line = refusal(capsys, "convert", tmp_path / "a", "--to", "jsonl", "--output", tmp_path / "b")
    assert "a.bin: token 0 of sequence 2: found 65000, wanted 0 to 9, the vocabulary" in line
    assert sorted(tmp_path.iterdir()) == files_before


def test_modes_that_a_form_does_not_have_are_left_out_and_said(tmp_path):
    dataset(tmp_path / "a", "mmap", multimodal=True)
    words = ("convert", tmp_path / "a", "--multimodal", "--output-prefix", tmp_path / "b", "--to")
    assert call(*words, "cached")[1] == "note: cached has no modes; they were left out\n"
    assert back(tmp_path / "b") == DOCS
    assert (
        call(*words, "mmap")[1]
        == f"note: {tmp_path / 'b'}: this dataset exists; it is replaced when this run ends\n"
    )
    assert IndexedDataset(tmp_path / "b", multimodal=True).modes is not None


def test_text_is_not_written_over_the_corpus_that_the_dataset_was_made_of(tmp_path, capsys):
    (tmp_path / "corpus.jsonl").write_text('{"text": "1 2 3"}\n', "utf-8")
    words = ("--output-prefix", tmp_path / "p", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9")
    call("preprocess", "--input", tmp_path / "corpus.jsonl", *words)
    output = ("--output", tmp_path / "corpus.jsonl")
    line = refusal(capsys, "convert", tmp_path / "p_text_document", "--to", "jsonl", *output)
    assert "--output: is one of the inputs: found" in line
    assert (tmp_path / "corpus.jsonl").read_text("utf-8") == '{"text": "1 2 3"}\n'
