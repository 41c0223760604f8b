"""The other index formats: written as Megatron does, read equally, refused if incomplete."""

from __future__ import annotations

import json
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_schema.dataset.atomic_dataset import atomic_folder
from mega_schema.dataset.idx_content import CHUNK
from mega_schema.dataset.indexed_dataset import (
    INDEX_FORMATS,
    DatasetInfo,
    IndexedDataset,
    IndexedWriter,
    open_dataset,
)
from mega_schema.errors import FormatError
from mega_schema.tokenizer.identity import TokenizerIdentity
from tests.shared_data import SHARED, needs_shared

GOLDEN = SHARED / "golden/indexed"
IDENTITY = TokenizerIdentity("NullTokenizer", 11, 10, None, None, "0" * 64)


def _accept_any(folder: Path) -> bool:
    return True


def write(prefix: Path, docs: list[list[list[int]]], form: str, dtype: str = "int32", **options) -> None:
    with IndexedWriter(prefix, dtype, index_format=form, **options) as writer:
        for doc in docs:
            for sequence in doc:
                writer.add(sequence)
            writer.end_document()


def back(data: IndexedDataset) -> list[list[list[int]]]:
    bounds = data.documents.tolist()
    return [[data[i].tolist() for i in range(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)]


@needs_shared
@pytest.mark.parametrize("name", ["legacy_cached_int32", "legacy_cached_int64", "legacy_cached_merged_int32"])
def test_a_cached_dataset_is_megatrons_byte_for_byte_and_read_back(name, tmp_path):
    entries = json.loads((GOLDEN / "corpora_legacy.json").read_text("utf-8"))
    parts = entries[name].get("merge_of", [name])
    docs = [doc for part in parts for doc in entries[part]["docs"]]
    write(tmp_path / name, docs, "cached", entries[name]["dtype"])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (GOLDEN / f"{name}{suffix}").read_bytes()
    data = open_dataset(GOLDEN / name)
    assert (data.index_format, data.dtype, back(data)) == ("cached", np.dtype(entries[name]["dtype"]), docs)


documents = st.lists(st.lists(st.lists(st.integers(0, 10), max_size=5), max_size=4), max_size=6)


@pytest.mark.parametrize("form", INDEX_FORMATS)
@settings(max_examples=40, deadline=None)
@given(docs=documents)
def test_any_documents_come_back_from_any_form(form, docs, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("any") / "some.corpus"
    if form == "fairseq-mmap" and not any(docs):
        docs = [[[1]]]
    write(prefix, docs, form, info=DatasetInfo(IDENTITY))
    data = IndexedDataset(prefix)
    readable = [[sequence] for doc in docs for sequence in doc] if form.startswith("fairseq") else docs
    assert (data.index_format, back(data)) == (form, readable)
    assert data.lengths.dtype == np.int32
    flat = [token for doc in docs for sequence in doc for token in sequence]
    assert data.view_range(0, data.tokens).tolist() == flat


def test_fairseqs_files_are_laid_out_as_fairseq_lays_them_out(tmp_path):
    docs = [[[11, 12, 13], [14]], [[15, 16]]]
    write(tmp_path / "m", docs, "fairseq-mmap", "uint16")
    head = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, 8, 3)
    assert (tmp_path / "m.idx").read_bytes() == head + struct.pack("<3i3q", 3, 1, 2, 0, 6, 8)
    assert (tmp_path / "m.bin").read_bytes() == struct.pack("<6H", *range(11, 17))
    write(tmp_path / "c", docs, "fairseq-cached", "int32")
    head = struct.pack("<8s5Q", b"TNTIDX\0\0", 1, 4, 4, 3, 3)
    assert (tmp_path / "c.idx").read_bytes() == head + struct.pack("<11q", 0, 1, 2, 3, 0, 3, 4, 6, 3, 1, 2)
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<6i", *range(12, 18))


def test_fairseqs_unsigned_dtypes_are_read(tmp_path):
    write(tmp_path / "u", [[[1, 2**32 - 1]]], "fairseq-mmap", "uint32")
    assert open_dataset(tmp_path / "u")[0].tolist() == [1, 2**32 - 1]
    for form, dtype in (("mmap", "uint32"), ("cached", "uint64")):
        with pytest.raises(ValueError, match=f"no {form} index of {dtype}"):
            write(tmp_path / "n", [[[1]]], form, dtype)


def test_an_id_that_cannot_be_one_higher_does_not_fit_fairseqs_cached_form(tmp_path):
    with pytest.raises(ValueError, match="do not fit in uint16"):
        write(tmp_path / "p", [[[65535]]], "fairseq-cached", "uint16")


@pytest.mark.parametrize("form", INDEX_FORMATS)
def test_a_dataset_is_opened_by_its_prefix_or_by_either_file(form, tmp_path):
    write(tmp_path / "a.b", [[[1, 2]], [[3]]], form)
    for name in ("a.b", "a.b.idx", "a.b.bin"):
        assert open_dataset(tmp_path / name)[1].tolist() == [3]
    with pytest.raises(FormatError, match=r"nothing.idx: no such file"):
        open_dataset(tmp_path / "nothing.bin")


@pytest.mark.parametrize("form", INDEX_FORMATS)
@pytest.mark.parametrize("seed", range(10))
def test_every_strict_prefix_of_an_index_of_any_form_is_refused(form, seed, tmp_path):
    rng = random.Random(seed)
    docs = [[[1] * rng.randrange(4) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(5))]
    write(tmp_path / "p", docs, form)
    path = tmp_path / "p.idx"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            open_dataset(tmp_path / "p")


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        (1, 2, "version: found 2, wanted 1"),
        (2, 99, r"dtype code: found 99"),
        (2, 6, "bytes of an id: found 4 of float64, wanted integers"),
        (3, 8, "bytes of an id: found 8 of int32, wanted 4 of int32"),
        (4, 10**18, "size in bytes"),
        (5, 2, "size in bytes"),
        (6, 0, "size in bytes"),
        (8, 3, "dimensions: wanted one of each sequence"),
        (11, 1, "pointer of sequence 0: found 1, wanted 0"),
        (12, 4, "end of sequence 0, in ids: found 4, wanted 3"),
        (15, -3, "length of a sequence: found -3, wanted 0 to 2147483647"),
        (15, 2**31, "length of a sequence: found 2147483648"),
        (18, 1, "document index: found 1 to 3, wanted ascending from 0 to 3"),
        (19, 9, "document index"),
    ],
)
def test_a_cached_index_that_contradicts_itself_is_refused_in_its_own_words(place, value, line, tmp_path):
    write(tmp_path / "p", [[[1, 2, 3], [4]], [[5]]], "cached")
    path = tmp_path / "p.idx"
    whole = bytearray(path.read_bytes())
    struct.pack_into("<q", whole, 8 * place, value)
    path.write_bytes(whole)
    with pytest.raises(FormatError, match=f"p.idx: {line}"):
        open_dataset(tmp_path / "p")


def test_a_fairseq_index_whose_pointers_do_not_follow_its_lengths_is_refused(tmp_path):
    write(tmp_path / "p", [[[1, 2, 3]], [[4]]], "fairseq-mmap")
    path = tmp_path / "p.idx"
    whole = bytearray(path.read_bytes())
    struct.pack_into("<q", whole, 26 + 2 * 4 + 8, 8)
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="pointer of sequence 1: found 8, wanted 12"):
        open_dataset(tmp_path / "p")


@pytest.mark.parametrize("form", INDEX_FORMATS[1:])
def test_only_the_first_form_has_modes(form, tmp_path):
    write(tmp_path / "p", [[[1, 2, 3]], [[4]]], form)
    with pytest.raises(FormatError, match="modes"):
        open_dataset(tmp_path / "p", multimodal=True)
    with pytest.raises(ValueError, match="with modes"):
        write(tmp_path / "q", [[[1]]], form, multimodal=True)


def test_documents_written_at_once_are_those_written_one_by_one(tmp_path):
    docs = [[[1, 2], []], [], [[3]], [[4, 5], [6]]]
    write(tmp_path / "one", docs, "mmap")
    with IndexedWriter(tmp_path / "all", "int32") as writer:
        lengths, sequences = np.array([2, 0, 1], np.int32), np.array([2, 0, 1])
        writer.extend(np.array([1, 2, 3], np.int32), lengths, sequences)
        writer.add([4, 5])
        writer.add([6])
        writer.end_document()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"all{suffix}").read_bytes()
    with IndexedWriter(tmp_path / "each", "int32") as writer:
        writer.extend(np.arange(3, dtype=np.int32), np.array([2, 1], np.int32))
    assert back(IndexedDataset(tmp_path / "each")) == [[[0, 1]], [[2]]]


@pytest.mark.parametrize("form", INDEX_FORMATS)
def test_an_index_longer_than_a_chunk_is_the_one_numpy_would_write(form, tmp_path):
    count = 2 * CHUNK + 3
    lengths = np.arange(count, dtype=np.int32) % 3
    with IndexedWriter(tmp_path / "p", "uint8", index_format=form) as writer:
        for part in np.array_split(lengths, 5):
            writer.extend(np.zeros(part.sum(), np.uint8), part)
    data = IndexedDataset(tmp_path / "p")
    assert (data.lengths == lengths).all()
    assert (data.documents == np.arange(count + 1)).all()
    assert (data.pointers == np.cumsum(lengths, dtype=np.int64) - lengths).all()


def test_a_writer_removes_what_a_killed_one_left_and_nothing_of_one_that_lives(tmp_path):
    left = [tmp_path / f"p.{kind}.99999999.tmp" for kind in ("bin", "idx", "json")]
    others = [tmp_path / name for name in ("p.bin.tmp", "px.bin.1.tmp", "p.bin.99.tmp.gz")]
    for path in left + others:
        path.write_bytes(b"")
    with IndexedWriter(tmp_path / "p", "int32"):
        assert not any(path.exists() for path in left)
        code = (
            "import sys; from pathlib import Path\n"
            "from mega_schema.dataset.indexed_dataset import IndexedWriter\n"
            "with IndexedWriter(Path(sys.argv[1]), 'int32') as w: w.add([7]); w.end_document()"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], check=True)
        assert IndexedDataset(tmp_path / "p")[0].tolist() == [7]
        assert list(tmp_path.glob("p.bin.*.tmp"))  # ours
    assert len(IndexedDataset(tmp_path / "p")) == 0
    assert all(path.exists() for path in others)


def test_a_folder_is_replaced_whole_and_what_a_killed_writer_left_is_removed(tmp_path):
    for name in (".t.1.mega-new", ".t.2.mega-old", ".tx.3.mega-new", "t.1.old", "t"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name, "utf-8")
    with atomic_folder(tmp_path / "t", _accept_any) as outer:
        (outer / "other").write_text("new", "utf-8")
        with pytest.raises(FileExistsError), atomic_folder(tmp_path / "t", _accept_any):
            pass  # a second writer leaves the folder of the first, which lives, alone
        assert (tmp_path / "t/file").read_text("utf-8") == "t"
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            outer.name,
            ".tx.3.mega-new",
            "t",
            "t.1.old",
        ]
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["other"]
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "t", _accept_any):
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tx.3.mega-new", "t", "t.1.old"]


def test_a_folder_that_could_not_be_replaced_is_there_again(tmp_path, monkeypatch):
    folder, real = tmp_path / "t", Path.rename
    folder.mkdir()
    (folder / "file").write_text("years", "utf-8")

    def ends(path, target):
        if path.suffix == ".mega-new":
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", ends)
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder, _accept_any):
        pass
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert (folder / "file").read_text("utf-8") == "years"
    folder.rename(tmp_path / ".t.99.mega-old")  # a process was killed between the renames
    (tmp_path / ".t.99.mega-new").mkdir()
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder, _accept_any):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert (folder / "file").read_text("utf-8") == "years"


def test_the_working_directory_can_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with atomic_folder(Path(), _accept_any) as new:
        (new / "file").write_text("x", "utf-8")
    assert (tmp_path / "here" / "file").read_text("utf-8") == "x"


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(tmp_path):
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from mega_schema.dataset.indexed_dataset import IndexedWriter\n"
        "from mega_schema.errors import MegaError\n"
        "try:\n"
        "    with IndexedWriter(Path(sys.argv[1]), 'int32') as writer:\n"
        "        for _ in range(100): writer.add(np.zeros(50_000, np.int32)); writer.end_document()\n"
        "except MegaError as error: print(error)"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, 10_000_000))

    words = [sys.executable, "-c", code, str(tmp_path / "p")]
    process = subprocess.run(words, check=True, capture_output=True, text=True, preexec_fn=limit)
    assert process.stdout == (
        f"{tmp_path}/p: not written: found File too large; hint: free disk space, or write to another disk\n"
    )
    assert list(tmp_path.iterdir()) == []
