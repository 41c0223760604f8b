from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mega_data.cli import commands
from mega_data.jsonl_shards import Quarantine, output_name, read_lines
from mega_data.readers.blocks import RowError
from mega_data.readers.csv_table import CsvBlock, read_csv_blocks
from mega_data.readers.inputs import expand_inputs
from mega_data.readers.nested_keys import replace_value, value_at, value_or_none
from mega_data.readers.streams import read_blocks
from mega_data.texts import read_texts
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError

ALPHABET = ["a", "b", "é", '"', ",", "\t", "\n", "\r\n", " ", "", "longer words"]


def run(words: str) -> int:
    with pytest.raises(SystemExit) as left:
        run_command(commands, words.split())
    assert isinstance(left.value.code, int)
    return left.value.code


def write_csv(rng: random.Random, columns: int, rows: int, **dialect: Any) -> tuple[str, list[list[str]]]:
    out = io.StringIO(newline="")
    writer = csv.writer(out, **dialect)
    values = [
        ["".join(rng.choices(ALPHABET, k=rng.randint(0, 6))) for _ in range(columns)] for _ in range(rows)
    ]
    writer.writerow([f"c{n}" for n in range(columns)])
    writer.writerows(values)
    return out.getvalue(), values


def blocks_of(data: bytes, size: int, start: int = 0, name: str = "a.csv") -> list[CsvBlock]:
    file = io.BytesIO(data)
    return list(read_csv_blocks(file, file.tell, start, size, Path(name)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_any_size_have_the_rows_that_the_csv_module_reads(seed: int) -> None:
    rng = random.Random(seed)
    delimiter = rng.choice(",\t")
    dialect = {"lineterminator": rng.choice(["\n", "\r\n"]), "delimiter": delimiter}
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    text, values = write_csv(rng, rng.randint(2, 4), rng.randint(0, 30), quoting=quoting, **dialect)
    text = text if rng.random() < 0.5 else text.rstrip("\r\n")
    data, name = text.encode(), "a.csv" if delimiter == "," else "a.tsv"
    blocks = blocks_of(data, rng.choice([1, 7, 100, 10_000]), name=name)
    rows = [fields for block in blocks for _, fields in block.read()]
    assert rows == values
    assert not blocks or blocks[-1].end == len(data)
    assert sum(block.consumed_bytes for block in blocks) == (len(data) if blocks else 0)
    lines = text.count("\n") + (not text.endswith("\n"))
    keys = list(blocks[0].header) if blocks else []
    assert sum(block.rows(keys).count for block in blocks) == (lines if blocks else 0)
    for index, block in enumerate(blocks):
        rest = blocks_of(data, 50, block.end, name)
        expected = [fields for later in blocks[index + 1 :] for _, fields in later.read()]
        assert [fields for later in rest for _, fields in later.read()] == expected


def test_wrong_rows_are_named_by_their_line_and_the_others_read() -> None:
    data = b'text,n\n"two\nlines",1\nshort\nok,2\n"a"b,3\n\xff,4\n\nend,5\n"open,6\n'
    (block,) = blocks_of(data, 1000)
    rows = block.rows(["text"])
    assert rows.texts == [("two\nlines",), ("ok",), ("end",)]
    assert [(error.row + 1, error.what) for error in rows.errors] == [
        (4, "a row of another number of fields"),
        (6, "not CSV"),
        (7, "not UTF-8"),
        (10, "not CSV"),
    ]
    assert rows.errors[0].raw == "short"
    assert (rows.errors[0].found, rows.errors[0].wanted) == ("1", "2, as the header")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,a\nx,y\n", "a.csv:1: two columns of one name: found a"),
        (b"\xff,a\n", "a.csv:1: not a header of CSV in UTF-8: found "),
    ],
)
def test_a_wrong_header_ends_the_run(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as wrong:
        blocks_of(data, 100)
    assert str(wrong.value).startswith(message)


def test_a_column_that_is_missing_is_named_with_those_that_exist() -> None:
    hint = "name a column with --json-key"
    with pytest.raises(FormatError, match=rf"a\.csv: no column 'text': found a, b; hint: {hint}$"):
        blocks_of(b"\xef\xbb\xbfa,b\nx,y\n", 100)[0].rows(["text"])


@pytest.mark.parametrize("skip", ["", "--on-error skip"])
@pytest.mark.parametrize(
    "command",
    ["clean --step whitespace --output out", "clean --step duplicates --output out", "dedup --output out"],
)
def test_a_missing_column_is_named_with_the_others_and_the_corrected_command_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    skip: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("id,body\n1,one\n2,a,b\n")
    assert run(f"{command} {skip} --input a.csv") == 2
    message = "error: a.csv: no column 'text': found id, body; hint: name a column with --json-key\n"
    assert message in capfd.readouterr().err
    assert run(f"{command} {skip} --input a.csv --json-key body --id-key url") == 2
    message = "error: a.csv: no column 'url': found id, body; hint: name a column with --id-key\n"
    assert message in capfd.readouterr().err
    assert run(f"{command} --on-error skip --input a.csv --json-key body") == 0


@pytest.mark.parametrize(
    ("name", "header", "separators"),
    [("a.csv", "id;text", "commas, or by tabs in a .tsv file"), ("a.tsv", "id,text", "tabs")],
)
def test_a_header_of_one_column_hints_at_the_separator(name: str, header: str, separators: str) -> None:
    (block,) = blocks_of(f"{header}\n1;x\n".encode(), 100, name=name)
    with pytest.raises(FormatError) as missing:
        block.rows(["text"])
    hint = f"name a column with --json-key, or separate the columns by {separators}"
    assert str(missing.value) == f"{name}: no column 'text': found {header}; hint: {hint}"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "b.tsv"])
def test_every_command_reads_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f'document "{n}", with\ntwo lines', "url": f"u{n}"} for n in range(20)]
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["url", "text"], dialect="excel-tab" if "tsv" in name else "excel")
    writer.writeheader()
    writer.writerows(rows)
    data = out.getvalue().encode()
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [json.loads(line) for line in read_lines(Path(name))] == rows
    assert run(f"dedup --input {name} --output out --preset exact") == 0
    assert output_name(Path(name)) == f"{name[0]}.jsonl"
    assert [json.loads(line) for line in read_lines(Path("out") / output_name(Path(name)))] == rows
    assert list(read_texts(expand_inputs([name]), "text")) == [row["text"] for row in rows]
    Path("c.txt").write_bytes(data)
    if "tsv" not in name:
        assert len(expand_inputs(["c.txt"], "csv")) == 1


@pytest.mark.parametrize("command", ["clean --step whitespace", "clean --step duplicates"])
def test_a_wrong_row_of_csv_goes_to_the_quarantine_with_its_line_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_bytes(b'\xef\xbb\xbfid,text\n1,"two\nlines"\n2,a,b,c\n3\n4,last\n')
    error = "a row of another number of fields: found 4, wanted 2, as the header"
    assert run(f"{command} --input a.csv --output out") == 2
    assert f"error: a.csv:4: {error}; hint: correct or delete the line" in capfd.readouterr().err
    assert run(f"{command} --input a.csv --output new --on-error skip") == 0
    (quarantine,) = Path("new/quarantine").rglob("a.jsonl")
    assert [json.loads(line) for line in quarantine.read_bytes().splitlines()] == [
        {"file": "a.csv", "line": 4, "reason": error, "row": "2,a,b,c"},
        {"file": "a.csv", "line": 5, "reason": error.replace("found 4", "found 1"), "row": "3"},
    ]
    documents = Path("new/a.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in documents] == ["1", "4"]


def test_the_quarantine_holds_no_value_that_an_error_lacks(tmp_path: Path) -> None:
    with Quarantine(tmp_path / "a.jsonl", Path("a.csv")) as quarantine:
        quarantine(2, FormatError("a.csv:2", "damaged"), b"x\n")
        quarantine(3, FormatError("a.csv:3", "damaged", wanted="text"), b"y\n")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]
    assert [row["reason"] for row in rows] == ["damaged", "damaged: wanted text"]


def test_a_nested_key_is_a_path_and_a_key_with_a_dot_has_priority() -> None:
    values = {"meta": {"text": "inner", "n": {"a.b": 1}}, "x.y": 2, "x": {"y": 3}}
    assert value_at(values, "meta.text") == "inner"
    assert value_at(values, "x.y") == 2
    assert value_or_none(values, "meta.none") is value_or_none(values, "meta.text.more") is None
    assert replace_value(values, "meta.text", "new") == {**values, "meta": {**values["meta"], "text": "new"}}  # type: ignore[dict-item]
    assert replace_value(values, "x.y", 4) == {**values, "x.y": 4}
    assert replace_value(values, "new.key", 4) == {**values, "new.key": 4}
    assert values["meta"] == {"text": "inner", "n": {"a.b": 1}}


def nested_rows() -> list[dict[str, Any]]:
    return [{"meta": {"text": f"text  {n}", "id": n}, "n": n} for n in range(10)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_nested_keys_are_read_in_every_format(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    table = pyarrow.Table.from_pylist(nested_rows())
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in nested_rows()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    (item,) = expand_inputs([str(path)])
    for keys in (["meta.text"], ["meta.text", "meta.text"]):
        (block,) = read_blocks(item, keys=keys)
        assert block.rows(keys).texts == [(f"text  {n}",) * len(keys) for n in range(10)]
    if kind != "jsonl":
        with pytest.raises(ConfigError, match=r"no column 'meta\.none': found meta, n"):
            list(read_blocks(item, keys=["meta.none"]))
    else:
        (error,) = next(iter(read_blocks(item, keys=["meta.x"]))).rows(["meta.x"]).errors[:1]
        assert isinstance(error, RowError)
        assert error.what == "no key 'meta.x'"


def test_commands_read_and_replace_the_text_under_a_nested_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nested_rows()))
    steps = "--step whitespace --step duplicates:preset=exact --step spans:fewest=0"
    assert run(f"clean --input a.jsonl --output out --json-key meta.text --id-key meta.id {steps}") == 0
    rows = [json.loads(line) for line in Path("out/a.jsonl").read_text().splitlines()]
    assert rows == [{"meta": {"text": f"text {n}", "id": n}, "n": n} for n in range(10)]
    encode = "preprocess --input a.jsonl --output-prefix p --tokenizer-type NullTokenizer --vocab-size 99"
    Path("a.jsonl").write_text('{"meta": {"ids": "1 2 3"}}\n')
    assert run(f"{encode} --json-keys meta.ids") == 0
    assert IndexedDataset(Path("p_meta.ids_document"))[0].tolist() == [1, 2, 3]
