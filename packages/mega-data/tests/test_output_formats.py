from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import zstandard

from mega_data import output_formats
from mega_data.cli import commands
from mega_data.jsonl_shards import read_lines
from mega_data.output_formats import OUTPUT_FORMATS, file_ending, formatted_name, open_output
from mega_data.readers.compression import open_decompressed
from mega_data.readers.frames import range_starts
from mega_schema.app.cli_runner import run_command
from mega_schema.errors import ConfigError

ROWS = [
    {"text": f"document {n} has the words of {n * n}", "n": n, "meta": {"url": f"u{n}"}} for n in range(40)
]
FORMATS = ["jsonl.gz", "jsonl.zst", "parquet"]


def run(words: str) -> int:
    with pytest.raises(SystemExit) as left:
        run_command(commands, words.split())
    assert isinstance(left.value.code, int)
    return left.value.code


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(path)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in/a.jsonl", ROWS)
    write_rows(
        tmp_path / "in/b.jsonl", ROWS[:3] + [{"text": "another text than all others", "n": 7, "meta": None}]
    )
    return tmp_path


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(
    "command", ["clean --step duplicates:preset=exact --step whitespace", "dedup --preset exact"]
)
def test_a_format_changes_the_files_and_not_their_rows(
    folder: Path, command: str, output_format: str
) -> None:
    suffix = OUTPUT_FORMATS[output_format]
    assert run(f"{command} --input in --output plain --keep-dropped") == 0
    assert run(f"{command} --input in --output out --keep-dropped --output-format {output_format}") == 0
    for name in ("a.jsonl", "b.jsonl"):
        assert rows_of(Path("out") / formatted_name(name, suffix)) == rows_of(Path("plain") / name)
    plain = sorted(str(p.relative_to("plain")) for p in Path("plain").rglob("dropped/**/*.jsonl"))
    assert plain == sorted(str(p.relative_to("out")) for p in Path("out").rglob("dropped/**/*.jsonl"))
    assert run(f"clean --step whitespace --input out --output again --output-format {output_format}") == 0


def test_each_file_is_of_the_format_that_its_name_says(folder: Path) -> None:
    for output_format in FORMATS:
        options = f"--output {output_format} --output-format {output_format}"
        assert run(f"dedup --preset exact --input in/a.jsonl {options}") == 0
    assert gzip.decompress(Path("jsonl.gz/a.jsonl.gz").read_bytes()) == Path("in/a.jsonl").read_bytes()
    frame = Path("jsonl.zst/a.jsonl.zst").read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(frame) == Path("in/a.jsonl").read_bytes()
    assert zstandard.get_frame_parameters(frame).has_checksum
    assert pyarrow.parquet.read_table("parquet/a.parquet").to_pylist() == ROWS


def test_equal_lines_give_equal_gzip_bytes_at_any_time_and_place(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        with open_output(tmp_path / f"{name}.jsonl.gz") as out:
            out.write(b'{"text": "a"}\n')
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b/c.jsonl.gz").read_bytes()


def test_a_parquet_column_has_one_type_over_all_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_data.output_formats._GROUP_BYTES", 1)
    rows = [{"a": 1}, {"b": "x"}, {"a": 2.5, "m": {"x": 1}}, {"a": None, "m": {"y": "z"}}]
    with open_output(tmp_path / "a.parquet") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert [str(table.schema.field(name).type) for name in ("a", "b")] == ["double", "string"]
    assert table.column("m").to_pylist() == [None, None, {"x": 1, "y": None}, {"x": None, "y": "z"}]
    assert list(tmp_path.iterdir()) == [tmp_path / "a.parquet"]


@pytest.mark.parametrize("values", [[1, "a"], [{"x": 1}, "a"], [[1], ["a"]], [10**30, 1], [{}, {}]])
def test_values_that_parquet_cannot_hold_leave_no_file(tmp_path: Path, values: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"a\.parquet: .*hint: --output-format jsonl\.zst"):  # noqa: SIM117
        with open_output(tmp_path / "a.parquet") as out:
            out.write("".join(json.dumps({"n": value}) + "\n" for value in values).encode())
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_rows_is_read_in_every_format(folder: Path) -> None:
    Path("in/c.jsonl").write_text("")
    for output_format in FORMATS:
        options = f"--output {output_format} --output-format {output_format}"
        run(f"clean --input in/b.jsonl in/c.jsonl --step length:minimum=1 {options}")
        encode = "preprocess --tokenizer-type NullTokenizer --vocab-size 9 --json-keys n"
        assert run(f"clean --input {output_format} --output {output_format}2 --step whitespace") == 0
        assert run(f"{encode} --input {output_format}/c.{output_format} --output-prefix x") in (0, 1)


@pytest.mark.parametrize("ending", ["jsonl", *FORMATS])
def test_extract_writes_one_file_in_the_format_of_its_name(folder: Path, ending: str) -> None:
    page = "<html><title>t</title><body><p>One paragraph that is long enough to be text.</p></body></html>"
    for name in ("p", "q"):
        Path(f"in/{name}.html").write_text(page)
    extract = "extract --input in/p.html in/q.html --full-page"
    for _ in range(2):  # the second run replaces the file of the first
        assert run(f"{extract} --output all.{ending}") == 0
    assert [row["title"] for row in rows_of(Path(f"all.{ending}"))] == ["t", "t"]
    assert run(f"{extract} --output pages --output-format {ending}") == 0
    assert [row["title"] for row in rows_of(Path(f"pages/p.html.{ending}"))] == ["t"]
    assert file_ending(Path(f"all.{ending}")) == f".{ending}"


def test_a_name_of_one_file_contradicts_another_format(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("in/p.html").write_text("<html></html>")
    assert run("extract --input in/p.html --output a.jsonl --output-format parquet") == 2
    err = capfd.readouterr().err
    wanted = "found parquet, wanted jsonl, by the name of --output"
    assert err == f"error: --output-format: contradicts --output: {wanted}\n"


def test_a_format_without_its_library_is_refused_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run("dedup --input in --output out --output-format parquet") == 2
    err = capfd.readouterr().err
    assert err.startswith(
        "error: --output-format: needs a library that is not installed: wanted pyarrow; hint: pip "
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 4000, 12345])
def test_an_output_is_frames_that_a_reader_can_divide_wherever_the_writes_end(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_formats, "FRAME_BYTES", 1000)
    rng = random.Random(size)
    data = bytes(rng.choices(b"abc\n", k=size))
    contents = list[bytes]()
    for longest in (1, 70, 5000):
        with open_output(tmp_path / name) as out:
            position = 0
            while position < size:
                position += out.write(data[position : position + rng.randint(1, longest)])
        contents.append((tmp_path / name).read_bytes())
        with open_decompressed(tmp_path / name) as file:
            assert file.read() == data
        starts = range_starts(tmp_path / name, Path(name).suffix, 1)
        assert len(starts) == max(1, -(-size // 1000))
    assert contents[0] == contents[1] == contents[2]
