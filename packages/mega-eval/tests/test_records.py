import gzip
import json
from pathlib import Path

import pytest

from mega_eval.records import is_record_file, list_record_files, read_records
from mega_schema.errors import FormatError


@pytest.fixture
def file(tmp_path):
    """A function that writes a file and returns its path."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


def read(path, *columns, suffixes=()):
    return read_records(list_record_files(path, suffixes), columns)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"q": "one\u2028two", "n": "1"}\n\n{"q": "x,\\"y", "n": "2"}'),
        ("a.jsonl.gz", '{"q": "one\u2028two", "n": "1"}\n{"q": "x,\\"y", "n": "2"}\n'),
        ("a.csv", 'q,n\none\u2028two,1\n"x,""y",2\n'),
        ("a.csv.gz", '\ufeffq,n\r\none\u2028two,1\r\n"x,""y",2\r\n'),
        ("a.tsv", 'q\tn\none\u2028two\t1\nx,"y\t2\n'),
    ],
)
def test_each_format_has_the_same_records(file, name, content):
    records = read(file(name, content))
    assert [dict(record.values) for record in records] == [
        {"q": "one\u2028two", "n": "1"},
        {"q": 'x,"y', "n": "2"},
    ]
    assert all(record.id.startswith(f"{name}:") for record in records)


def test_a_record_is_named_by_the_line_it_begins_in(file):
    records = read(file("a.csv", 'q,n\n"two\nlines",1\nlast,2\n'))
    assert [record.id for record in records] == ["a.csv:2", "a.csv:4"]
    assert records[1].where.endswith("a.csv:4")


def test_a_file_without_header_takes_the_names_of_the_columns(file):
    [record] = read(file("a.csv", "What?,4\n"), "question", "answer")
    assert record.values == {"question": "What?", "answer": "4"}


def test_a_folder_is_read_in_the_order_of_names_and_a_passage_is_a_record(file, tmp_path):
    for name in ("high/2.txt", "high/1.txt", "middle/1.txt"):
        file(name, json.dumps({"article": name}))
    file("README", "no passage")
    records = read(tmp_path, suffixes=(".txt",))
    assert [record.id for record in records] == ["high/1.txt", "high/2.txt", "middle/1.txt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl: no records in the file"),
        ("a.csv", "q,n\n", "a.csv: no records in the file"),
        ("a.jsonl", '{"q": 1}\noops\n', r"a.jsonl:2: not JSON: found unexpected character.* at column 1"),
        ("a.jsonl", '{"q": \n', "a.jsonl:1: not JSON: found "),
        ("1.txt", '{\n "q": é}', r"1.txt:2: not JSON: found unexpected character.* at column 7"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: not a JSON object"),
        ("a.jsonl", b"\xff{}\n", "a.jsonl:1: not UTF-8: found byte 0xff at column 1"),
        ("a.csv", "q,n\none\n", r"a.csv:2: wrong number of columns: found 1, wanted 2 \(q, n\)"),
        ("a.csv", 'q,n\n"one,2\n', "a.csv:2: not CSV"),
        ("a.parquet", "PAR1", "a.parquet: no known ending of a task file"),
    ],
)
def test_a_malformed_file_is_one_line_that_names_the_place(file, name, content, message):
    with pytest.raises(FormatError, match=message) as error:
        read(file(name, content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_record_file_is_known_by_its_name_also_compressed(suffix):
    assert all(is_record_file(Path(f"a{ending}{suffix}")) for ending in (".jsonl", ".json", ".csv", ".tsv"))
    assert not any(is_record_file(Path(f"a{ending}{suffix}")) for ending in ("", ".txt", ".parquet"))


def test_a_missing_file_names_what_is_there(file, tmp_path):
    file("lambada_test.jsonl.gz", "")
    with pytest.raises(
        FormatError, match=r"test\.jsonl: no such file; hint: did you mean .*_test\.jsonl\.gz\?"
    ):
        read(tmp_path / "lambada_test.jsonl")
    with pytest.raises(FormatError, match=r"/x/y: no such file; hint: ls .*[^/x]$"):
        read(tmp_path / "x/y")
    with pytest.raises(
        FormatError, match=r"none: no such file: wanted a file, or a folder with \*\.txt; hint"
    ):
        read(tmp_path / "none", suffixes=(".txt",))


def test_a_damaged_or_missing_file_is_refused(file, tmp_path):
    path = file("a.jsonl.gz", '{"q": "some text that is long enough"}\n' * 50)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError, match=r"a\.jsonl\.gz: damaged or truncated"):
        read(path)
    with pytest.raises(FormatError, match="none: no such file"):
        read(tmp_path / "none")
    with pytest.raises(FormatError, match=r"is a folder: wanted a file"):
        read(tmp_path)
    with pytest.raises(FormatError, match=r"no such files in the folder: wanted \*\.txt"):
        read(tmp_path, suffixes=(".txt",))


def test_a_missing_key_names_line_and_keys(file):
    [record] = read(file("a.jsonl", '{"b": 1, "a": null}\n'))
    with pytest.raises(FormatError, match=r"a\.jsonl:1: no key 'q': found a, b, wanted q"):
        record.text("q")
    with pytest.raises(FormatError, match=r"a\.jsonl:1 a: not text: found NoneType"):
        record.text("a")
    with pytest.raises(FormatError, match=r"a\.jsonl:1 a: not a list of strings: found null"):
        record.texts("a")
    with pytest.raises(FormatError, match=r"a\.jsonl:1 b: not an object: found int"):
        record.read_object("b")
    assert record.text("b") == "1"
