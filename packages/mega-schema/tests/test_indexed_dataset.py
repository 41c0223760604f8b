"""Dataset files equal Megatron's byte for byte, and incomplete files are refused."""

from __future__ import annotations

import json
import pickle
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_schema.dataset.indexed_dataset import (
    HEADER,
    DatasetInfo,
    IndexedDataset,
    IndexedWriter,
    sibling,
    smallest_dtype,
)
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import TokenizerIdentity
from tests.shared_data import SHARED, needs_shared

GOLDEN = SHARED / "golden/indexed"
IDENTITY = TokenizerIdentity("NullTokenizer", 11, 10, None, None, "0" * 64)
GOLDEN_NAMES = [
    "gptA_int32_text_document",
    "gptB_uint16_text_document",
    "gptL_uint16_text_document",
    "sent_uint16_text_sentence",
    "multimodal_int32",
    "merged_sent_then_gptB_uint16",
    "legacy_mmap_uint16",
    *(f"dtype_{name}" for name in ["uint8", "int8", "int16", "int32", "int64", "uint16"]),
    *("dtype_float64", "dtype_float32"),
]


def corpus(name: str) -> dict:
    both = {}
    for file in ("corpora.json", "corpora_legacy.json"):
        both.update(json.loads((GOLDEN / file).read_text("utf-8")))
    entry = both[name]
    if "merge_of" in entry:
        entry["docs"] = [doc for part in entry["merge_of"] for doc in both[part]["docs"]]
    if "docs" not in entry:  # only lengths are told: the tokens are in the payload
        tokens = np.fromfile(GOLDEN / f"{name}.bin", entry["dtype"])
        ends = np.cumsum(entry["lengths"])[:-1]
        entry["docs"] = [[sequence.tolist()] for sequence in np.split(tokens, ends)]
    return entry


def write(prefix: Path, docs: list[list[list[int]]], dtype: str = "uint16", **options) -> None:
    modes = options.pop("modes", None)
    with IndexedWriter(prefix, dtype, multimodal=modes is not None, **options) as writer:
        for number, doc in enumerate(docs):
            for place, sequence in enumerate(doc):
                writer.add(sequence, mode=modes[number][place] if modes else 0)
            writer.end_document()


@needs_shared
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_written_files_are_megatrons_byte_for_byte_and_read_back(name, tmp_path):
    entry = corpus(name)
    modes = entry.get("modes")
    write(tmp_path / name, entry["docs"], entry["dtype"], modes=modes)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (GOLDEN / f"{name}{suffix}").read_bytes()
    data = IndexedDataset(GOLDEN / name, multimodal=modes is not None)
    sequences = [sequence for doc in entry["docs"] for sequence in doc]
    assert [data[i].tolist() for i in range(len(data))] == sequences
    assert data.documents.tolist() == np.cumsum([0, *map(len, entry["docs"])]).tolist()
    assert data.dtype == np.dtype(entry["dtype"])
    if modes is not None:
        assert data.modes is not None
        assert data.modes.tolist() == [mode for doc in modes for mode in doc]


@needs_shared
def test_a_corpus_of_megatrons_own_preprocessing_opens():
    data = IndexedDataset(SHARED / "data/megatron-fixtures/meg-gpt2-openwebtext_text_document")
    assert (len(data), len(data.documents), data.dtype) == (1000, 1001, np.uint16)
    assert data.info is None


documents = st.lists(st.lists(st.lists(st.integers(0, 10), max_size=5), max_size=4), max_size=6)


@settings(max_examples=60, deadline=None)
@given(docs=documents)
def test_any_documents_come_back_empty_ones_included(docs, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("any") / "some.corpus"
    write(prefix, docs, info=DatasetInfo(IDENTITY))
    data = IndexedDataset(prefix)
    bounds = data.documents.tolist()
    back = [[data[i].tolist() for i in range(a, b)] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert back == docs
    assert data.info is not None
    assert data.info.tokens == sum(len(sequence) for doc in docs for sequence in doc)


def test_reading_a_part_is_slicing_the_whole(tmp_path):
    write(tmp_path / "p", [[[1, 2, 3, 4, 5]], [[6]]])
    data = IndexedDataset(tmp_path / "p")
    for offset in range(6):
        for length in range(6 - offset):
            assert data.read(0, offset, length).tolist() == [1, 2, 3, 4, 5][offset : offset + length]
        assert data.read(0, offset).tolist() == [1, 2, 3, 4, 5][offset:]
    assert data[-1].tolist() == [6]
    for bad in ((0, 2, 4), (0, -1, 1), (0, 0, -1), (0, 6, None)):
        with pytest.raises(IndexError, match="tokens"):
            data.read(*bad)
    for i in (2, -3):
        with pytest.raises(IndexError, match=f"sequence {i} of 2"):
            data[i]


def test_a_sequence_is_a_view_of_the_file_that_cannot_be_written(tmp_path):
    write(tmp_path / "p", [[[1, 2]]])
    data = IndexedDataset(tmp_path / "p")
    assert data[0].base is not None
    assert not data[0].flags.writeable


def test_a_dataset_sent_to_another_process_is_its_path(tmp_path):
    write(tmp_path / "p", [[list(range(10)) * 1000]])
    sent = pickle.dumps(IndexedDataset(tmp_path / "p"))
    assert len(sent) < 1000
    assert pickle.loads(sent)[0].tolist() == list(range(10)) * 1000


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(None, "i4"), (1, "u2"), (65499, "u2"), (65500, "i4"), (10**6, "i4")]
)
def test_dtype_follows_the_vocabulary_as_megatrons(vocab, dtype):
    assert smallest_dtype(vocab) == np.dtype(dtype)


@pytest.mark.parametrize("seed", range(40))
def test_every_strict_prefix_of_an_index_is_refused(seed, tmp_path):
    rng = random.Random(seed)
    docs = [[[1] * rng.randrange(4) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(5))]
    modes = [[1] * len(doc) for doc in docs] if seed % 2 else None
    write(tmp_path / "p", docs, modes=modes)
    path = tmp_path / "p.idx"
    whole = path.read_bytes()
    has_modes = modes is not None and any(modes)
    for size in {0, 8, 9, 25, 26, 33, 34, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))}:
        if size < len(whole):
            path.write_bytes(whole[:size])
            with pytest.raises(FormatError):
                IndexedDataset(tmp_path / "p", multimodal=has_modes)


@pytest.mark.parametrize("seed", range(20))
def test_an_index_with_changed_bytes_is_refused_or_reads_within_the_payload(seed, tmp_path):
    rng = random.Random(seed)
    write(tmp_path / "p", [[[1, 2, 3]], [], [[4], [5, 6]]])
    path = tmp_path / "p.idx"
    whole = path.read_bytes()
    for _ in range(30):
        position = rng.randrange(len(whole))
        path.write_bytes(whole[:position] + bytes([rng.randrange(256)]) + whole[position + 1 :])
        try:
            data = IndexedDataset(tmp_path / "p")
            assert all(len(data[i]) == data.lengths[i] for i in range(len(data)))
        except FormatError:
            pass


def test_tampering_anywhere_in_the_header_is_refused(tmp_path):
    write(tmp_path / "p", [[[1, 2, 3]], [[4], [5, 6]]])
    path = tmp_path / "p.idx"
    whole = path.read_bytes()
    for position in range(HEADER.size):
        for flip in (1, 0x80):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
            with pytest.raises(FormatError):
                IndexedDataset(tmp_path / "p")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"magic": b"NOTHING\0\0"}, r"p.idx: not an index: magic: found b'NOTHING"),
        ({"version": 2}, r"p.idx: version: found 2, wanted 1"),
        ({"code": 9}, r"p.idx: dtype code: found 9, wanted 1 \(uint8\)"),
        ({"code": 4}, r"p.bin: size in bytes: found 12, wanted 16"),
        ({"n": 4}, r"p.idx: size in bytes: found 94, wanted 106 for 4 sequences and 2 documents"),
        ({"n": 10**18}, r"p.idx: size in bytes"),
        ({"d": 0}, r"p.idx: document boundaries: found 0"),
    ],
)
def test_a_header_of_something_else_is_refused_in_its_own_words(change, line, tmp_path):
    write(tmp_path / "p", [[[1, 2, 3]], [[4], [5, 6]]])
    path = tmp_path / "p.idx"
    whole = path.read_bytes()
    head = {"magic": b"MMIDIDX\0\0", "version": 1, "code": 8, "n": 3, "d": 3, **change}
    path.write_bytes(HEADER.pack(*head.values()) + whole[HEADER.size :])
    with pytest.raises(FormatError, match=line):
        IndexedDataset(tmp_path / "p")


@pytest.mark.parametrize(
    ("bounds", "lengths", "pointers", "line"),
    [
        ([1, 1, 3], None, None, "document index: found 1 to 3, wanted ascending from 0 to 3"),
        ([0, 1, 2], None, None, "document index: found 0 to 2"),
        ([0, 4, 3], None, None, "document index"),
        (None, [3, -1, 2], None, "length of a sequence: found -1"),
        (None, [3, 1, 3], None, "p.bin: size in bytes: found 12, wanted 14"),
        (None, None, [0, 6, 2], "p.bin: size in bytes: found 12, wanted 6"),
    ],
)
def test_an_index_that_contradicts_itself_or_the_payload_is_refused(
    bounds, lengths, pointers, line, tmp_path
):
    write(tmp_path / "p", [[[1, 2, 3]], [[4], [5, 6]]])
    path = tmp_path / "p.idx"
    body = struct.pack("<3i", *(lengths or [3, 1, 2])) + struct.pack("<3q", *(pointers or [0, 6, 8]))
    path.write_bytes(path.read_bytes()[: HEADER.size] + body + struct.pack("<3q", *(bounds or [0, 1, 3])))
    with pytest.raises(FormatError, match=line):
        IndexedDataset(tmp_path / "p")


@pytest.mark.parametrize("pointer", [7, 100, -2])
def test_a_pointer_that_leads_out_of_the_payload_is_refused_when_read(pointer, tmp_path):
    write(tmp_path / "p", [[[1, 2, 3]], [[4], [5, 6]]])
    path = tmp_path / "p.idx"
    whole = bytearray(path.read_bytes())
    struct.pack_into("<q", whole, HEADER.size + 12 + 8, pointer)
    path.write_bytes(whole)
    data = IndexedDataset(tmp_path / "p")
    with pytest.raises(
        FormatError, match=f"pointer of sequence 1: found {pointer}, wanted multiples of 2 up to 12"
    ):
        data[1]


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_a_payload_of_another_size_is_refused(change, tmp_path):
    write(tmp_path / "p", [[[1, 2, 3]]])
    path = tmp_path / "p.bin"
    path.write_bytes((path.read_bytes() + b"\0\0")[: 6 + change])
    with pytest.raises(FormatError, match=f"p.bin: size in bytes: found {6 + change}, wanted 6"):
        IndexedDataset(tmp_path / "p")


def test_modes_that_were_not_asked_for_are_explained_and_so_are_missing_ones(tmp_path):
    write(tmp_path / "m", [[[1, 2], [3]]], modes=[[0, 1]])
    with pytest.raises(FormatError, match="multimodal dataset: open it as one"):
        IndexedDataset(tmp_path / "m")
    write(tmp_path / "t", [[[1, 2], [3]]])
    with pytest.raises(FormatError, match="it has no modes"):
        IndexedDataset(tmp_path / "t", multimodal=True)


def test_a_missing_file_is_named_and_a_prefix_with_its_ending_is_explained(tmp_path):
    with pytest.raises(FormatError, match=r"p.idx: no such file"):
        IndexedDataset(tmp_path / "p")
    write(tmp_path / "p", [[[1]]])
    with pytest.raises(FormatError, match=r"p.idx.idx: no such file; hint: give only the prefix: .*/p$"):
        IndexedDataset(tmp_path / "p.idx")
    (tmp_path / "p.bin").unlink()
    with pytest.raises(FormatError, match=r"p.bin: no such file"):
        IndexedDataset(tmp_path / "p")


def test_the_json_beside_comes_back_with_its_counts(tmp_path):
    info = DatasetInfo(IDENTITY, sources=("a.jsonl",), options={"key": "text"})
    write(tmp_path / "p", [[[1, 2]], [], [[3], [4]]], info=info)
    read = IndexedDataset(tmp_path / "p").info
    assert read is not None
    assert (read.documents, read.sequences, read.tokens) == (3, 3, 4)
    assert (read.tokenizer, read.sources, read.options) == (IDENTITY, ("a.jsonl",), {"key": "text"})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": 2}, "format number: found 2, wanted 1"),
        ({"tokens": 3}, r"documents, sequences, tokens: found \(1, 1, 3\), wanted \(1, 1, 2\)"),
        ({"tokens": -1}, "tokens: not a count: found -1"),
        ({"extra": 0}, "keys"),
        ({"options": []}, "options and sources"),
        ({"tokenizer": {}}, "tokenizer: keys of a tokenizer identity"),
    ],
)
def test_a_json_that_does_not_fit_its_dataset_is_refused(change, line, tmp_path):
    write(tmp_path / "p", [[[1, 2]]], info=DatasetInfo(IDENTITY))
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **change}), "utf-8")
    with pytest.raises(FormatError, match=line):
        IndexedDataset(tmp_path / "p")
    for content in (b"", b"\xff", b"[1]"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"p.json: "):
            IndexedDataset(tmp_path / "p")


def _write_and_stop(prefix: Path) -> None:
    with IndexedWriter(prefix, "uint16", DatasetInfo(IDENTITY)) as writer:
        writer.add([1])
        writer.end_document()
        raise KeyboardInterrupt


def test_an_interrupted_write_leaves_nothing_and_keeps_what_was_there(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _write_and_stop(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "p", [[[7, 8]]])
    with pytest.raises(KeyboardInterrupt):
        _write_and_stop(tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]
    assert IndexedDataset(tmp_path / "p")[0].tolist() == [7, 8]


def test_whenever_a_replacement_stops_no_reader_sees_a_mixture(tmp_path, monkeypatch):
    """Stop before each rename in turn: the dataset is the old one, the new one, or absent."""
    replace = Path.replace
    for stop in range(4):
        write(tmp_path / "p", [[[7, 7]]], info=DatasetInfo(IDENTITY))
        left = iter([True] * stop)

        def count_replacements(self: Path, target: Path, left=left) -> Path:
            if not next(left, False):
                raise OSError("pulled the plug")
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", count_replacements)
        try:
            write(tmp_path / "p", [[[8, 8]]], info=DatasetInfo(IDENTITY))
        except OSError:
            assert stop < 3
        monkeypatch.undo()
        if sibling(tmp_path / "p", ".idx").exists():
            assert IndexedDataset(tmp_path / "p")[0].tolist() == [8, 8]
            assert stop == 3


def test_ids_that_do_not_fit_the_dtype_are_a_bug_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="do not fit in uint16"):
        write(tmp_path / "p", [[[65536]]])
    with pytest.raises(ValueError, match="do not fit in uint16"):
        write(tmp_path / "p", [[[-1]]])
    with pytest.raises(ValueError, match="one dimension"):
        write(tmp_path / "p", [[[[1, 2]]]])
    with (
        pytest.raises(ValueError, match="belong to no document"),
        IndexedWriter(tmp_path / "p", "u2") as writer,
    ):
        writer.add([1])
    assert list(tmp_path.iterdir()) == []


def test_the_files_in_the_documentation_are_the_ones_we_write(tmp_path):
    """docs/formats/dataset.md shows `11 12 13`, an empty document and `14`, with 20 as their end."""
    page = (Path(__file__).parents[3] / "docs/formats/dataset.md").read_text("utf-8")
    dumps = re.findall(r"```hexdump\n(.*?)```", page, re.DOTALL)
    shown = [b"".join(bytes.fromhex(line[10:49]) for line in dump.splitlines()) for dump in dumps]
    write(tmp_path / "p", [[[11, 12, 13, 20]], [], [[14, 20]]])
    assert shown == [(tmp_path / f"p{suffix}").read_bytes() for suffix in (".idx", ".bin")]
