"""Every input format yields its rows once, in order and numbered, from any block boundary."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mega_data.readers import arrow, streams
from mega_data.readers.blocks import JsonLines
from mega_data.readers.inputs import InputFile, expand_inputs, format_of_name
from mega_data.readers.streams import read_blocks
from mega_schema.errors import ConfigError, FormatError


def zst(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2  # two frames, as tools that append write
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zst,
}


def jsonl(rng: random.Random, count: int) -> bytes:
    rows = [json.dumps({"text": "7 " * rng.randrange(40)}) for _ in range(count)]
    return ("\n".join(rows) + "\n" * rng.randrange(2)).encode()


def texts(item: InputFile, start: int = 0, **more: object) -> list[tuple[int, str]]:
    """Each text with its number in what is read."""
    rows, first = list[tuple[int, str]](), 0
    for block in read_blocks(item, start, keys=["text"], **more):  # type: ignore[arg-type]
        read = block.rows(["text"])
        assert not read.errors
        rows += [(first + n, str(text)) for n, (text,) in zip(read.numbers, read.texts, strict=True)]
        first += read.count
    return rows


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("seed", range(5))
def test_lines_come_once_with_their_numbers_and_from_the_end_of_any_block(packing, seed, tmp_path):
    rng = random.Random(seed)
    data = jsonl(rng, 50)
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](data))
    wanted = [(i, json.loads(line)["text"]) for i, line in enumerate(data.splitlines())]
    item, size = InputFile(path, "jsonl"), rng.randrange(1, 300)
    assert texts(item, size=size) == wanted
    all_blocks = list(read_blocks(item, keys=["text"], size=size))
    assert sum(block.consumed_bytes for block in all_blocks) <= path.stat().st_size
    number = rng.randrange(len(all_blocks))
    passed = sum(block.rows(["text"]).count for block in all_blocks[: number + 1])
    assert texts(item, all_blocks[number].end, size=size) == [
        (i - passed, text) for i, text in wanted[passed:]
    ]


@pytest.mark.parametrize("packing", [p for p in PACK if p])
def test_a_packed_file_that_is_damaged_is_named(packing, tmp_path):
    if packing == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"a.jsonl{packing}"
    whole = PACK[packing](jsonl(random.Random(1), 2000))
    for data in (
        whole[: len(whole) * 3 // 4],
        b"nothing packed at all",
        whole[:60] + b"\0\xff" * 40 + whole[140:],
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=re.escape(f"{path}: damaged: found ")):
            texts(InputFile(path, "jsonl"))


def test_a_packing_whose_library_is_missing_says_what_to_install(tmp_path, monkeypatch):
    import sys

    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"")
    for name, extra in (("zstandard", "zst"), ("pyarrow", "parquet")):
        monkeypatch.setitem(sys.modules, name, None)
        path = next(p for p in tmp_path.iterdir() if p.suffix.endswith(extra))
        with pytest.raises(ConfigError, match=rf"wanted {name}; hint: pip install .*mega-data\[{extra}\]"):
            texts(InputFile(path, format_of_name(path)))


TEXT = b"one\ntwo\n\n\nthree\r\n\n four\nfive"


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [
        ("file", [(0, TEXT.decode())]),
        ("line", [(0, "one"), (1, "two"), (4, "three"), (6, " four"), (7, "five")]),
        ("paragraph", [(0, "one\ntwo"), (4, "three"), (6, " four\nfive")]),
    ],
)
@pytest.mark.parametrize("size", [1, 9, 1000])
def test_a_plain_text_is_documents_by_its_unit(unit, wanted, size, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    assert [text for _, text in texts(InputFile(path, "text"), unit=unit, size=size)] == [
        text for _, text in wanted
    ]
    if size == 1000:
        assert texts(InputFile(path, "text"), unit=unit) == wanted


def test_bytes_that_are_not_utf8_are_a_fault_of_their_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\xff\nthree\n")
    (block,) = read_blocks(InputFile(path, "text"), keys=["text"], unit="line")
    rows = block.rows(["text"])
    assert (rows.numbers, [fault.row for fault in rows.errors], rows.count) == ([0, 2], [1], 3)
    assert str(rows.errors[0].error(path, 1)).startswith(f"{path}:2: not UTF-8: found byte 0 of it")


def test_a_line_without_end_is_refused_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_TEXT_BYTES", 1000)
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"x" * 5000) if name.endswith("gz") else b"x" * 5000)
        with pytest.raises(FormatError, match="a line or text of more than 0 MiB"):
            texts(InputFile(path, format_of_name(path)), size=64)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_table_gives_its_rows_from_the_end_of_any_block(form, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"{i} " * (i % 7) for i in range(2500)]
    table = pyarrow.table({"id": list(range(2500)), "text": rows})
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=700)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            for batch in table.to_batches(300):
                stream.write_batch(batch)
    item = InputFile(path, "table")
    assert texts(item, size=1000) == list(enumerate(rows))
    all_blocks = list(read_blocks(item, keys=["text"], size=1000))
    assert len(all_blocks) > 5
    assert texts(item, all_blocks[3].end, size=1000) == list(enumerate(rows[all_blocks[3].end :]))
    with pytest.raises(ConfigError, match=r"no column 'txt': found id, text; hint: see --json-key"):
        list(read_blocks(item, keys=["txt"]))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(FormatError, match="damaged"):
        texts(item)


def test_a_null_in_a_table_is_a_fault(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    (block,) = read_blocks(InputFile(tmp_path / "a.parquet", "table"), keys=["text"])
    rows = block.rows(["text"])
    assert (rows.numbers, [(fault.row, fault.found) for fault in rows.errors]) == ([0, 2], [(1, "NoneType")])


def test_inputs_are_files_globs_and_folders_in_the_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.txt", "d.parquet", "notes.md", ".hidden.jsonl", "odd.data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*words: object, form: str | None = None) -> list[tuple[str, str]]:
        return [(item.path.name, item.format) for item in expand_inputs([str(word) for word in words], form)]

    expected = [("a.jsonl.gz", "jsonl"), ("b.jsonl", "jsonl"), ("d.parquet", "table"), ("c.txt", "text")]
    assert names(tmp_path) == expected
    assert names(tmp_path / "*.jsonl*", tmp_path / "odd.data") == [*expected[:2], ("odd.data", "jsonl")]
    assert names(tmp_path / "sub/c.txt", form="jsonl") == [("c.txt", "jsonl")]
    (item,) = expand_inputs(["-"])
    assert (item.is_stdin, item.size) == (True, 0)
    for word in (tmp_path / "none", tmp_path / "*.none"):
        with pytest.raises(ConfigError, match="--input: no files there: found .*none"):
            names(word)


def test_a_saved_dataset_of_hugging_face_is_its_arrow_files(tmp_path):
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).touch()
    assert [item.path.name for item in expand_inputs([str(tmp_path)])] == ["data-00000-of-00001.arrow"]


def test_stdin_is_read_as_it_comes(monkeypatch):
    class Fake:
        buffer = io.BytesIO(b'{"text": "1"}\n{"text": "2"}')

    monkeypatch.setattr(streams.sys, "stdin", Fake)
    assert texts(InputFile(Path("-"), "jsonl"), size=5) == [(0, "1"), (1, "2")]


def test_workers_read_plain_lines_themselves(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "1"}\n' * 3)
    all_blocks = list(read_blocks(InputFile(path, "jsonl"), keys=["text"], size=1))
    assert [block.data for block in all_blocks if isinstance(block, JsonLines)] == [None, None, None]


def test_long_rows_of_a_table_are_read_by_bytes_not_by_count(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = random.Random(0)
    letters = "".join(rng.choice("abcdefghij ") for _ in range(100_000))
    rows = [f"{i} {letters[i:]}" for i in range(200)]  # 20 MB
    parquet.write_table(pyarrow.table({"id": list(range(200)), "text": rows}), tmp_path / "a.parquet")
    read, sizes = parquet.ParquetFile.iter_batches, []

    def count_bytes(*words, **names):
        for batch in read(*words, **names):
            sizes.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", count_bytes)
    assert texts(InputFile(tmp_path / "a.parquet", "table")) == list(enumerate(rows))
    assert [row["text"] for row in arrow.read_rows(tmp_path / "a.parquet")] == rows
    assert max(sizes) < 6 << 20
