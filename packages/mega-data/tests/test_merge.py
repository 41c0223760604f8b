"""A merge equals writing all documents at once; incompatible datasets are refused."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_data import merge as module
from mega_data.cli import commands
from mega_data.inspect import verify_dataset
from mega_data.merge import find_prefixes, merge_datasets
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter, open_dataset
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from tests.shared_data import SHARED, needs_shared

GOLDEN = SHARED / "golden/indexed"
Docs = list[list[list[int]]]


def dataset(prefix: Path, docs: Docs, dtype: str = "uint16", **options) -> IndexedDataset:
    modes = options.get("multimodal", False)
    with IndexedWriter(prefix, dtype, **options) as writer:
        for doc in docs:
            for sequence in doc:
                writer.add(sequence, mode=len(sequence) % 2)
            writer.end_document()
    return IndexedDataset(prefix, multimodal=modes)


def equal_files(first: Path, second: Path, suffixes: tuple[str, ...] = (".bin", ".idx")) -> bool:
    return all(
        first.with_name(first.name + suffix).read_bytes()
        == second.with_name(second.name + suffix).read_bytes()
        for suffix in suffixes
    )


@needs_shared
@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (("sent_uint16_text_sentence", "gptB_uint16_text_document"), "merged_sent_then_gptB_uint16"),
        (("legacy_cached_int32", "legacy_cached_int32"), "legacy_cached_merged_int32"),
    ],
)
def test_a_merge_is_megatrons_byte_for_byte(parts, whole, tmp_path):
    merge_datasets([open_dataset(GOLDEN / part) for part in parts], tmp_path / "m")
    assert equal_files(tmp_path / "m", GOLDEN / whole)


many = st.lists(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), max_size=4), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(parts=many, multimodal=st.booleans(), workers=st.integers(1, 3))
def test_a_merge_is_what_writing_all_documents_at_once_gives(parts, multimodal, workers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge")
    datasets = [dataset(folder / f"{i}", docs, multimodal=multimodal) for i, docs in enumerate(parts)]
    dataset(folder / "all", [doc for docs in parts for doc in docs], multimodal=multimodal)
    result = merge_datasets(datasets, folder / "m", workers=workers)
    assert equal_files(folder / "all", folder / "m")
    assert result.documents == sum(map(len, parts))
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("in_kernel", [True, False])
def test_payloads_of_many_pieces_are_copied_whole_in_any_order(in_kernel, tmp_path, monkeypatch):
    def refuse_copy(*_: object) -> int:
        raise OSError(errno.EXDEV, "another file system")

    if not in_kernel:
        monkeypatch.setattr(module.os, "copy_file_range", refuse_copy)
    monkeypatch.setattr(module, "COPY_BYTES", 2000)
    rng = random.Random(1)
    parts = [[[[rng.randrange(60000) for _ in range(rng.randrange(4000))]]] for _ in range(5)]
    datasets = [dataset(tmp_path / f"{i}", docs) for i, docs in enumerate(parts)]
    dataset(tmp_path / "all", [doc for docs in parts for doc in docs])
    copied_bytes: list[int] = []
    result = merge_datasets(datasets, tmp_path / "m", workers=3, progress=copied_bytes.append)
    assert equal_files(tmp_path / "all", tmp_path / "m")
    assert sum(copied_bytes) == result.size == (tmp_path / "m.bin").stat().st_size


def test_a_folder_is_merged_in_the_order_of_megatrons_file_names(tmp_path):
    for name in ("b", "a", "a-1", "a.1", "A"):
        dataset(tmp_path / name, [[[1]]])
    (tmp_path / "notes.json").write_text("{}", "utf-8")
    assert [path.name for path in find_prefixes(tmp_path)] == ["A", "a-1", "a.1", "a", "b"]
    (tmp_path / "a.idx").unlink()
    with pytest.raises(FormatError, match=r"a.idx: no such file; hint: complete or remove its other file"):
        find_prefixes(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="empty: no datasets: wanted files that end in .bin and .idx"):
        find_prefixes(tmp_path / "empty")


def test_what_the_datasets_say_of_themselves_is_merged(tmp_path):
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=10)
    prefixes = []
    for name, eod in (("a", True), ("b", False), ("a2", True)):
        options = {"key": "text", "append_eod": eod}
        info = DatasetInfo(tokenizer.identity, sources=(f"{name[0]}.jsonl",), options=options)
        prefixes.append(dataset(tmp_path / name, [[[1], [2]], []], info=info))
        tokenizer.save(tmp_path / f"{name}.tokenizer")
    result = merge_datasets(prefixes, tmp_path / "m")
    merged = IndexedDataset(tmp_path / "m")
    assert merged.info == DatasetInfo(
        tokenizer.identity, 6, 6, 6, sources=("a.jsonl", "b.jsonl"), options={"key": "text"}
    )
    assert result.differing == ("append_eod",)
    assert verify_dataset(merged) == 11
    assert (tmp_path / "m.tokenizer/identity.json").exists()


def test_datasets_that_do_not_belong_together_are_refused_and_leave_nothing(tmp_path):
    ten, eleven = (DatasetInfo(open_tokenizer("NullTokenizer", vocab_size=n).identity) for n in (10, 11))
    a, b = dataset(tmp_path / "a", [[[1]]], info=ten), dataset(tmp_path / "b", [[[1]]], info=eleven)
    bare = dataset(tmp_path / "bare", [[[1]]])
    wide = dataset(tmp_path / "wide", [[[1]]], "int32")
    modes = dataset(tmp_path / "modes", [[[1]]], multimodal=True)
    high = dataset(tmp_path / "high", [[[1]]], "int32", index_format="fairseq-cached")
    files_before = sorted(tmp_path.iterdir())
    for datasets, line in (
        (
            [a, b],
            r"b.json: tokenizer is not that of .*/a: found NullTokenizer \(12 ids, .* wanted .*\(11 ids",
        ),
        (
            [a, bare],
            r"bare.json: no such file, so its tokenizer is not known: wanted as .*a.json; hint: --ass",
        ),
        ([bare, wide], r"wide.idx: dtype: found int32, wanted uint16 as .*/bare; hint: mega-data convert"),
        ([bare, modes], "modes.idx: modes: wanted of all datasets or of none"),
        (
            [wide, high],
            "high.idx: ids have another offset on disk: found fairseq-cached, wanted mmap",
        ),
    ):
        with pytest.raises(FormatError, match=line):
            merge_datasets(datasets, tmp_path / "m")
    with pytest.raises(ConfigError, match=r"--output-prefix: is one of the inputs: found .*/a"):
        merge_datasets([bare, a], tmp_path / "a")
    with pytest.raises(ConfigError, match="--datasets: none given"):
        merge_datasets([], tmp_path / "m")
    assert sorted(tmp_path.iterdir()) == files_before
    merge_datasets([a, bare], tmp_path / "m", assume_same_tokenizer=True)
    assert IndexedDataset(tmp_path / "m").info is not None


def test_a_dataset_whose_pointers_are_not_in_order_is_not_merged(tmp_path):
    dataset(tmp_path / "a", [[[1, 2]], [[3]], [[4]]])
    path = tmp_path / "a.idx"
    whole = bytearray(path.read_bytes())
    whole[34 + 12 + 8] = 2
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="a.idx: pointer of sequence 1: found 2, wanted 4"):
        merge_datasets([IndexedDataset(tmp_path / "a")], tmp_path / "m")


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = dataset(tmp_path / "a", [[[1]]])
    files_before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(module.os, "copy_file_range", full)
    with pytest.raises(
        MegaError, match="m: not written: found No space left on device; hint: free disk space"
    ):
        merge_datasets([data], tmp_path / "m")
    assert sorted(tmp_path.iterdir()) == files_before


def test_the_command_merges_named_datasets_or_a_folder(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in "ab":
        dataset(tmp_path / "in" / name, [[[ord(name)]], []])
    for words in (
        ["--datasets", tmp_path / "in/a", tmp_path / "in/b.idx", "--merge", "serial"],
        ["--input", tmp_path / "in"],
    ):
        line = [*map(str, ["merge", *words, "--output-prefix", tmp_path / "m"])]
        result = CliRunner().invoke(commands, line, catch_exceptions=False)
        assert result.stdout.startswith(f"{tmp_path}/m: 2 datasets, 4 documents, 2 sequences, 2 tokens, ")
        data = IndexedDataset(tmp_path / "m")
        assert [data[0].tolist(), data[1].tolist()] == [[97], [98]]
    for words, given_inputs in (
        ([], "neither"),
        (["--input", tmp_path, "--datasets", tmp_path / "m"], "both"),
    ):
        with pytest.raises(SystemExit):
            run_command(commands, [*map(str, ["merge", *words, "--output-prefix", tmp_path / "n"])])
        assert (
            f"--datasets, --input: exactly one is required: found {given_inputs}" in capsys.readouterr().err
        )


def test_more_datasets_than_files_a_shell_may_open_are_merged(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(80):
        dataset(tmp_path / f"in/{n:03}", [[[n]]])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

    words = ["merge", "--input", tmp_path / "in", "--output-prefix", tmp_path / "m"]
    subprocess.run([sys.executable, "-m", "mega_data", *map(str, words)], check=True, preexec_fn=limit)
    assert IndexedDataset(tmp_path / "m").view_range(0, 80).tolist() == [*range(80)]


def test_a_note_names_the_options_that_differ(tmp_path):
    identity = open_tokenizer("NullTokenizer", vocab_size=300).identity
    for name in "ab":
        dataset(tmp_path / name, [[[1]]], info=DatasetInfo(identity, options={"append_eod": name == "a"}))
    words = ["merge", "--datasets", tmp_path / "a", tmp_path / "b", "--output-prefix", tmp_path / "m"]
    result = CliRunner().invoke(commands, [*map(str, words)], catch_exceptions=False)
    assert result.stderr == "note: made with different options: append_eod (see each PREFIX.json)\n"
    assert json.loads((tmp_path / "m.json").read_bytes())["options"] == {}


def test_merging_to_another_form_keeps_documents_where_the_form_has_them(tmp_path):
    docs: Docs = [[[1, 2], [3]], [], [[4]]]
    a, b = dataset(tmp_path / "a", docs), dataset(tmp_path / "b", docs, index_format="cached")
    merge_datasets([a, b], tmp_path / "m", index_format="cached")
    dataset(tmp_path / "all", docs + docs, index_format="cached")
    assert equal_files(tmp_path / "m", tmp_path / "all")
    merge_datasets([a, b], tmp_path / "f", index_format="fairseq-mmap")
    assert IndexedDataset(tmp_path / "f").documents.tolist() == np.arange(7).tolist()
