from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_schema import remote_files
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.remote_files import RemotePath, check_libraries, find_remote_files, is_remote, path_of
from tests.web_server import FileServer, serve_files

pytest.importorskip("aiohttp")
pytest.importorskip("fsspec")
DATA = random.Random(1).randbytes(3_000_000)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote_files, "_FIRST_WAIT", 0.001)
    (tmp_path / "a.bin").write_bytes(DATA)
    with serve_files(tmp_path) as started:
        yield started


def test_a_remote_path_prints_its_url_and_survives_pickling() -> None:
    path = RemotePath("s3://bucket/folder/a.jsonl.gz")
    assert isinstance(path, Path)
    assert str(path) == f"{path}" == "s3://bucket/folder/a.jsonl.gz"
    assert (path.name, path.stem, path.suffix) == ("a.jsonl.gz", "a.jsonl", ".gz")
    assert path.key == "bucket/folder/a.jsonl.gz"
    assert str(path.with_name("b")) == "s3://bucket/folder/b"
    assert str(path.parent / "b") == "s3://bucket/folder/b"
    copy = pickle.loads(pickle.dumps(path))
    assert (copy, str(copy), hash(copy)) == (path, str(path), hash(path))
    assert RemotePath("https://host/a.parquet?download=true").name == "a.parquet"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/a", True),
        ("s3:/b/a", False),
        ("hf:allenai/c4", False),
        ("hf://datasets/a", True),
        ("ftp://a/b", False),
        ("a/b", False),
        (Path("a"), False),
        (RemotePath("gs://b/a"), True),
    ],
)
def test_a_remote_path_is_a_url_of_a_known_scheme(path: str | Path, expected: bool) -> None:
    assert is_remote(path) == expected
    assert isinstance(path_of(str(path)), RemotePath) == expected


@pytest.mark.parametrize("seed", range(6))
def test_any_reads_and_seeks_give_the_bytes_of_the_file(server: FileServer, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([0, 1, 1 << 16, (1 << 16) + 1, 700_000, len(DATA)])
    (server.folder / "a.bin").write_bytes(DATA[:size])
    position = 0
    with RemotePath(f"{server.url}/a.bin").open("rb", buffering=rng.choice([-1, 1 << 20])) as file:
        for _ in range(40):
            if rng.random() < 0.4:
                position = file.seek(rng.randrange(size + 10))
            count = rng.choice([1, 100, 70_000, 400_000])
            data = file.read(count)
            assert data == DATA[:size][position : position + count]
            position += len(data)
        assert file.tell() == position


def test_a_file_is_requested_once_and_in_growing_ranges(server: FileServer) -> None:
    with RemotePath(f"{server.url}/a.bin").open("rb") as file:
        assert file.read() == DATA
    ranges = sorted(
        [int(edge) for edge in wanted.removeprefix("bytes=").split("-")]
        for method, wanted in server.requests
        if method == "GET"
    )
    sizes = [end + 1 - start for start, end in ranges]
    assert sum(sizes) == len(DATA)
    assert sizes[:5] == [1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20]
    assert [method for method, _ in server.requests].count("HEAD") == 2  # the second checks the version


@pytest.mark.parametrize("is_cut", [False, True])
def test_failed_requests_are_repeated(server: FileServer, is_cut: bool) -> None:
    server.failures = 4
    server.is_cut = is_cut
    with RemotePath(f"{server.url}/a.bin").open("rb") as file:
        assert file.read() == DATA
    server.failures = 1000
    with (
        RemotePath(f"{server.url}/a.bin").open("rb") as file,
        pytest.raises(MegaError, match=r"a\.bin: failed 5 times: found .*; hint: is the network there\?"),
    ):
        file.read()


def test_a_server_without_ranges_is_named(server: FileServer) -> None:
    server.has_ranges = False
    with (
        RemotePath(f"{server.url}/a.bin").open("rb") as file,
        pytest.raises(MegaError, match=r"a\.bin: the server does not send ranges of the file"),
    ):
        file.read(10)


def test_a_file_that_changes_while_it_is_read_is_an_error(server: FileServer) -> None:
    with RemotePath(f"{server.url}/a.bin").open("rb") as file:
        file.read(10)
        (server.folder / "a.bin").write_bytes(DATA[::-1])
        with pytest.raises(FormatError, match="changed while it was read"):
            file.read()


def test_a_missing_file_and_a_missing_server_are_told_apart(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = RemotePath(f"{server.url}/none")
    assert not missing.exists()
    with pytest.raises(FileNotFoundError) as left:
        missing.stat()
    assert left.value.filename == f"{server.url}/none"
    with pytest.raises(MegaError, match="failed 5 times"):
        RemotePath("http://127.0.0.1:9/a").stat()


def test_a_web_server_that_lists_its_files_answers_a_glob(server: FileServer) -> None:
    for name in ("b.jsonl", "c.jsonl", "d.txt"):
        (server.folder / name).touch()
    names = [path.name for path in find_remote_files(f"{server.url}/*.jsonl", lambda name: True)]
    assert names == ["b.jsonl", "c.jsonl"]
    assert find_remote_files(f"{server.url}/d.txt", lambda name: False) == [RemotePath(f"{server.url}/d.txt")]
    assert find_remote_files(f"{server.url}/none", lambda name: True) == []


@pytest.mark.parametrize(("scheme", "part"), [("http", "host"), ("s3", "bucket")])
def test_a_url_without_a_host_is_refused_at_once(scheme: str, part: str) -> None:
    """The next part was taken for the host, and the request was repeated for seconds."""
    with pytest.raises(ConfigError) as refused:
        path_of(f"{scheme}:///x")
    assert str(refused.value) == f"{scheme}:///x: names no {part}; hint: {scheme}://{part.upper()}/FILE"


@pytest.mark.parametrize(
    ("url", "missing", "hint"),
    [
        ("s3://b/a", "s3fs", "install it"),
        ("https://b/a", "fsspec", "install it"),
        ("gs://b/a", "gcsfs", "pip install gcsfs"),
    ],
)
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(
    url: str, missing: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError) as refused:
        check_libraries("--input", url, "install it")
    scheme = url.partition("://")[0]
    what = f"{scheme}:// needs a library that is not installed"
    assert str(refused.value) == f"--input: {what}: wanted {missing}; hint: {hint}"
