"""`inspect` counts the content of a dataset, and `verify` locates faults."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mega_data.inspect import document_text, open_dataset_tokenizer, summarize, verify_dataset
from mega_data.train_tokenizer import train
from mega_schema.dataset.indexed_dataset import HEADER, DatasetInfo, IndexedDataset, IndexedWriter
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer


def dataset(prefix: Path, docs: list[list[list[int]]], tokenizer: Tokenizer | None = None) -> IndexedDataset:
    info = DatasetInfo(tokenizer.identity) if tokenizer else None
    with IndexedWriter(prefix, "int32", info) as writer:
        for doc in docs:
            for sequence in doc:
                writer.add(sequence)
            writer.end_document()
    return IndexedDataset(prefix)


def test_counts_and_lengths(tmp_path):
    docs = [[list(range(n))] for n in range(1, 102)] + [[], [[1], [2]]]
    summary = summarize(dataset(tmp_path / "p", docs))
    assert (summary.documents, summary.empty_documents, summary.sequences) == (103, 1, 103)
    assert summary.tokens == 101 * 102 // 2 + 2
    assert (summary.dtype, summary.size) == ("int32", 4 * summary.tokens)
    assert (summary.lengths[0], summary.lengths[-1]) == (1, 101)
    assert list(summary.lengths) == sorted(summary.lengths)
    assert summarize(dataset(tmp_path / "empty", [])).lengths == ()


def test_a_document_is_shown_as_text_with_its_tokenizer_and_as_ids_without(tmp_path):
    tokenizer = train(["ab"], 300)
    data = dataset(tmp_path / "p", [[tokenizer.encode('say "ab"'), tokenizer.encode("\nend")], []], tokenizer)
    assert open_dataset_tokenizer(data) is None
    assert document_text(data, 0, tokenizer, 100) == '"say \\"ab\\"\\nend"'
    assert document_text(data, 0, tokenizer, 3) == '"say" ...'
    assert document_text(data, 1, tokenizer, 3) == '""'
    ids = " ".join(map(str, tokenizer.encode('say "ab"') + tokenizer.encode("\nend")))
    assert document_text(data, 0, None, 1000) == ids
    assert ids.startswith(document_text(data, 0, None, 10).removesuffix(" ..."))


def test_a_tokenizer_folder_of_another_dataset_is_refused(tmp_path):
    ours, second = (open_tokenizer("NullTokenizer", vocab_size=size) for size in (10, 11))
    data = dataset(tmp_path / "p", [[[1]]], ours)
    ours.save(tmp_path / "p.tokenizer")
    assert open_dataset_tokenizer(data).identity == ours.identity
    second.save(tmp_path / "p.tokenizer")
    with pytest.raises(FormatError, match=r"p.json: tokenizer of the dataset is not the model's"):
        verify_dataset(data)


def test_ids_outside_the_vocabulary_are_found_where_they_are(tmp_path):
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=10)
    whole = dataset(tmp_path / "a", [[[1, 2], [], [3, 10]]], tokenizer)
    assert verify_dataset(whole) == 11
    assert verify_dataset(dataset(tmp_path / "e", [], tokenizer)) == 11
    for bad in (11, -1):
        data = dataset(tmp_path / "p", [[[1, 2], [], [3, bad, 4]]], tokenizer)
        with pytest.raises(FormatError, match=rf"p.bin: token 1 of sequence 2: found {bad}, wanted 0 to 10"):
            verify_dataset(data)
    bare = dataset(tmp_path / "bare", [[[1, 12]]])
    assert verify_dataset(bare) == 0
    with pytest.raises(FormatError, match="token 1 of sequence 0: found 12, wanted 0 to 11"):
        verify_dataset(bare, vocab_size=12)


def test_a_pointer_that_is_not_where_the_sequence_before_ends_is_found(tmp_path):
    dataset(tmp_path / "p", [[[1, 2]], [[3]], [[4]]])
    path = tmp_path / "p.idx"
    whole = bytearray(path.read_bytes())
    struct.pack_into("<q", whole, HEADER.size + 3 * 4 + 8, 4)
    path.write_bytes(whole)
    with pytest.raises(FormatError, match=r"p.idx: pointer of sequence 1: found 4, wanted 8"):
        verify_dataset(IndexedDataset(tmp_path / "p"))
