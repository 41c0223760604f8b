"""Inputs on an S3 server and on a web server, both started here."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mega_data.cli import commands
from mega_data.commands.preprocess_tasks import Placement, preprocess_tasks
from mega_data.preprocess import Options, preprocess
from mega_data.readers.inputs import expand_inputs
from mega_data.readers.ranges import split_inputs
from mega_schema import remote_files
from mega_schema.app.cli_runner import run_command
from mega_schema.errors import FormatError
from mega_schema.remote_files import RemotePath
from mega_schema.tokenizer.tokenizer import open_tokenizer
from tests.s3_server import serve_s3
from tests.web_server import FileServer, serve_files

pytest.importorskip("moto")
pytest.importorskip("s3fs")

ROWS = [{"text": f"{n} {n + 1} 7", "meta": {"n": n}} for n in range(3000)]


def run(words: str) -> int:
    with pytest.raises(SystemExit) as left:
        run_command(commands, words.split())
    assert isinstance(left.value.code, int)
    return left.value.code


def write_shards(folder: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:1000]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[1000:2000])))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[2000:]), folder / "c.parquet")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with serve_s3() as environment:
        yield environment


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket; a file system of fsspec reads the environment when it is opened."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    file_system = RemotePath("s3://bucket/x").file_system()
    if not file_system.exists("bucket"):
        file_system.mkdir("bucket")
    return "s3://bucket"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_files, "_FIRST_WAIT", 0.001)
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in")
    return tmp_path


@pytest.fixture
def shards(bucket: str, folder: Path) -> str:
    for path in (folder / "in").iterdir():
        RemotePath("s3://b/x").file_system().put_file(str(path), f"bucket/in/{path.name}")
    for name in ("dropped/d.jsonl", ".hidden/e.jsonl", "report.json", "f.yaml"):
        RemotePath("s3://b/x").file_system().pipe_file(f"bucket/in/{name}", b"{}\n")
    return f"{bucket}/in"


@pytest.fixture
def web(folder: Path) -> Iterator[FileServer]:
    with serve_files(folder / "in") as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.jsonl"))}


ENCODE = "preprocess --tokenizer-type NullTokenizer --vocab-size 9999"


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess_writes_the_same_bytes_from_s3_and_from_this_machine(
    folder: Path, shards: str, workers: int
) -> None:
    assert run(f"{ENCODE} --input in --output-prefix local") == 0
    assert run(f"{ENCODE} --input {shards} --output-prefix remote --workers {workers}") == 0
    for suffix in (".bin", ".idx"):
        remote = Path(f"remote_text_document{suffix}").read_bytes()
        assert remote == Path(f"local_text_document{suffix}").read_bytes()
    sources = json.loads(Path("remote_text_document.json").read_bytes())["sources"]
    assert sources == [f"{shards}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]


@pytest.mark.parametrize("size", [900, 5000])
def test_tasks_read_ranges_of_lines_and_row_groups_from_s3(folder: Path, shards: str, size: int) -> None:
    table = pyarrow.Table.from_pylist(ROWS[2000:])
    pyarrow.parquet.write_table(table, folder / "in/c.parquet", row_group_size=100)
    RemotePath(f"{shards}/c.parquet").file_system().put_file("in/c.parquet", "bucket/in/c.parquet")
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=9999)
    preprocess(expand_inputs(["in"]), folder / "local", tokenizer)
    inputs = expand_inputs([shards])
    assert [part.input for part in split_inputs(inputs, size)].count(0) > 5
    assert [part.input for part in split_inputs(inputs, size)].count(2) > 1
    preprocess_tasks(inputs, folder / "remote", tokenizer, Options(), Placement("local", 1, None, size))
    for suffix in (".bin", ".idx"):
        remote = Path(f"remote_text_document{suffix}").read_bytes()
        assert remote == Path(f"local_text_document{suffix}").read_bytes()
    RemotePath(f"{shards}/a.jsonl").file_system().pipe_file(
        "bucket/in/a.jsonl", b'{"text": "1"}\n' * 70 + b"{}\n"
    )
    message = r"a\.jsonl: line \d+ after byte \d+: no key 'text'"
    with pytest.raises(FormatError, match=message):
        preprocess_tasks(
            expand_inputs([shards]), folder / "wrong", tokenizer, Options(), Placement(split_bytes=500)
        )


def test_tasks_may_write_to_s3_a_stage_at_a_time(folder: Path, shards: str) -> None:
    assert run(f"{ENCODE} --input in --output-prefix local") == 0
    words = f"{ENCODE} --input in --output-prefix s3://bucket/tasks/corpus --work-dir work"
    files = RemotePath("s3://bucket/x").file_system()
    for stage in ("plan", "encode:0", "encode", "index", "join"):
        assert run(f"{words} --stage {stage}") == 0
        assert not files.exists("bucket/tasks")
    assert run(words) == 0
    for suffix in (".bin", ".idx"):
        uploaded = files.cat_file(f"bucket/tasks/corpus_text_document{suffix}")
        assert uploaded == Path(f"local_text_document{suffix}").read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        "dedup --preset exact",
        "clean --step whitespace --step duplicates:preset=exact",
        pytest.param("dedup --preset exact --workers 2", marks=pytest.mark.long),
    ],
)
def test_shards_are_cleaned_from_s3_as_from_this_machine(folder: Path, shards: str, command: str) -> None:
    assert run(f"{command} --input in --output local") == 0
    words = f"{shards}/*.jsonl {shards}/b.jsonl.gz {shards}/c.parquet"
    assert run(f"{command} --input {words} --output remote") == 0
    assert contents(Path("remote")) == contents(Path("local"))


def test_the_files_of_a_folder_are_those_that_a_local_one_has(folder: Path, shards: str) -> None:
    for words in ([shards], [f"{shards}/"], [f"{shards}/[abc].*"], [shards, f"{shards}/a.jsonl"]):
        assert [str(item.path) for item in expand_inputs(words)] == [
            f"{shards}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")
        ]
        sizes = [path.stat().st_size for path in sorted(Path("in").iterdir())]
        assert [item.size for item in expand_inputs(words)] == sizes


def test_a_place_without_files_is_named(folder: Path, shards: str, capfd: pytest.CaptureFixture[str]) -> None:
    for url in (f"{shards}/none", f"{shards}/*.none", "s3://no-such-bucket/a"):
        assert run(f"{ENCODE} --input {url} --output-prefix x") == 2
        assert f": found {url}" in capfd.readouterr().err


def test_a_changed_object_does_not_resume(
    folder: Path, shards: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = expand_inputs([f"{shards}/a.jsonl"])[0].state()
    assert expand_inputs([f"{shards}/a.jsonl"])[0].state() == before
    file_system = RemotePath("s3://b/x").file_system()
    file_system.pipe_file("bucket/in/a.jsonl", Path("in/a.jsonl").read_bytes()[::-1])
    assert expand_inputs([f"{shards}/a.jsonl"])[0].state() != before


def test_every_command_reads_a_web_server_that_fails_now_and_then(folder: Path, web: FileServer) -> None:
    assert run(f"{ENCODE} --input in/a.jsonl in/c.parquet --output-prefix local") == 0
    web.failures = 3
    assert run(f"{ENCODE} --input {web.url}/a.jsonl {web.url}/c.parquet --output-prefix remote") == 0
    for suffix in (".bin", ".idx"):
        remote = Path(f"remote_text_document{suffix}").read_bytes()
        assert remote == Path(f"local_text_document{suffix}").read_bytes()
    page = "<html><title>t</title><body><p>One paragraph that is long enough to be text.</p></body></html>"
    Path("in/p.html").write_text(page)
    web.failures = 2
    web.is_cut = True
    assert run(f"extract --input {web.url}/p.html --full-page --output pages.jsonl") == 0
    assert json.loads(Path("pages.jsonl").read_bytes())["id"] == f"{web.url}/p.html"
    assert run(f"train-tokenizer --input {web.url}/a.jsonl --vocab-size 300 --output tokenizer") == 0


def test_a_run_stopped_in_the_middle_resumes_in_the_middle(folder: Path, web: FileServer) -> None:
    lines = Path("in/a.jsonl").read_bytes()
    Path("in/big.jsonl").write_bytes(lines * 40 + b"{wrong\n" + lines)
    options = f"{ENCODE} --input {web.url}/big.jsonl --output-prefix remote"
    assert run(options) == 2
    web.requests.clear()
    assert run(f"{options} --on-error skip") == 0
    starts = [int(wanted.removeprefix("bytes=").partition("-")[0]) for _, wanted in web.requests if wanted]
    assert max(starts) > 1 << 20
    assert run(f"{ENCODE} --input in/big.jsonl --output-prefix local --on-error skip") == 0
    assert Path("remote_text_document.bin").read_bytes() == Path("local_text_document.bin").read_bytes()


def test_a_server_that_fails_for_good_is_one_line(
    folder: Path, web: FileServer, capfd: pytest.CaptureFixture[str]
) -> None:
    web.failures = 1000
    for words in (f"{ENCODE} --output-prefix x", "dedup --output out"):
        assert run(f"{words} --input {web.url}/a.jsonl") == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {web.url}/a.jsonl: failed 5 times: found ")
