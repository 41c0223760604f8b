"""Datasets on a web server: the tokens of the file, read by ranges, once, and again after damage."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_schema.dataset import remote_dataset
from mega_schema.dataset.dataset_info import DatasetInfo
from mega_schema.dataset.indexed_dataset import IndexedDataset, IndexedWriter
from mega_schema.dataset.remote_dataset import BLOCK
from mega_schema.errors import FormatError, MegaError
from mega_schema.remote_files import RemotePath
from mega_schema.tokenizer.tokenizer import open_tokenizer, open_tokenizer_folder
from tests.web_server import FileServer, serve_files

pytest.importorskip("aiohttp")

SEQUENCES = 40
TOKENS = 8000  # of a sequence; all are ten blocks


def write_dataset(folder: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with IndexedWriter(folder / "corpus", np.uint16) as out:
        for _ in range(SEQUENCES):
            out.add(rng.integers(0, 60000, TOKENS))
            out.end_document()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_dataset(folder)
    return folder


@pytest.fixture
def web(files: Path) -> Iterator[FileServer]:
    with serve_files(files) as server:
        yield server


def open_remote(web: FileServer, cache: Path) -> IndexedDataset:
    return IndexedDataset(RemotePath(f"{web.url}/corpus"), cache=cache)


def block_requests(web: FileServer) -> int:
    """Return the number of requests for blocks; copies of small files begin at byte 0 too."""
    return sum(method == "GET" for method, _ in web.requests)


def test_the_tokens_are_those_of_the_file(web: FileServer, files: Path, tmp_path: Path) -> None:
    local, remote = IndexedDataset(files / "corpus"), open_remote(web, tmp_path)
    assert len(remote) == SEQUENCES
    for i in (3, 39, 0, 17):
        assert remote[i].tolist() == local[i].tolist()
        assert remote.read(i, 5, 7).tolist() == local.read(i, 5, 7, copy=True).tolist()
        assert remote.read(i, 5, 0).tolist() == []
    assert remote.view_range(0, remote.tokens).tolist() == local.view_range(0, local.tokens).tolist()
    copy = pickle.loads(pickle.dumps(remote))
    assert copy[5].tolist() == local[5].tolist()


@given(st.lists(st.tuples(st.integers(0, SEQUENCES * TOKENS), st.integers(0, 3 * BLOCK)), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
def test_any_ranges_in_any_order(
    web: FileServer, files: Path, tmp_path: Path, ranges: list[tuple[int, int]]
) -> None:
    local, remote = IndexedDataset(files / "corpus"), open_remote(web, tmp_path / os.urandom(4).hex())
    clipped = [(first, min(first + count, local.tokens)) for first, count in ranges]
    assert remote.remote is not None
    remote.remote.payload.prefetch([(2 * first, 2 * last) for first, last in clipped[::2]])
    for first, last in clipped:
        assert np.array_equal(remote.view_range(first, last), local.view_range(first, last))


def test_what_was_read_is_not_read_again(web: FileServer, tmp_path: Path) -> None:
    first = open_remote(web, tmp_path)
    wanted = first.view_range(0, first.tokens).tolist()
    before = block_requests(web)
    assert first.view_range(0, first.tokens).tolist() == wanted
    reopened = open_remote(web, tmp_path)
    assert reopened.view_range(0, reopened.tokens).tolist() == wanted
    assert block_requests(web) == before


def test_prefetched_samples_are_requested_once(web: FileServer, files: Path, tmp_path: Path) -> None:
    local, remote = IndexedDataset(files / "corpus"), open_remote(web, tmp_path)
    before = block_requests(web)
    remote.prefetch([(0, 0, None), (0, 10, 20), (1, 0, None)])
    with ThreadPoolExecutor(8) as threads:
        for i, ids in zip((0, 1) * 4, threads.map(remote.read, (0, 1) * 4), strict=True):
            assert np.array_equal(ids, local[i])
    assert block_requests(web) == before + 1, "consecutive blocks are one request"


def test_a_damaged_block_is_read_again(web: FileServer, files: Path, tmp_path: Path) -> None:
    remote = open_remote(web, tmp_path)
    remote.view_range(0, remote.tokens)
    [blocks] = tmp_path.glob("*/blocks")
    content = bytearray(blocks.read_bytes())
    content[5] ^= 1
    content[3 * BLOCK + 1] ^= 1
    blocks.write_bytes(content)
    reopened, local = open_remote(web, tmp_path), IndexedDataset(files / "corpus")
    before = block_requests(web)
    assert np.array_equal(reopened.view_range(0, reopened.tokens), local.view_range(0, local.tokens))
    assert block_requests(web) == before + 2


def test_a_full_disk_does_not_stop_a_run(
    web: FileServer,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def write_nothing(descriptor: int, values: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote_dataset, "write_at", write_nothing)
    monkeypatch.setattr(remote_dataset, "_MEMORY_BLOCKS", 3)
    monkeypatch.setattr(remote_dataset, "_MAX_READ", 3)
    monkeypatch.setattr(remote_dataset, "_MAX_RANGE", 1)
    local, remote = IndexedDataset(files / "corpus"), open_remote(web, tmp_path)
    for i in (0, 20, 0, 39):
        assert np.array_equal(remote[i], local[i])
    assert "is full: further tokens of" in caplog.text


def test_a_replaced_dataset_has_a_cache_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_dataset(tmp_path / "files")
    with serve_files(tmp_path / "files") as web:
        before = open_remote(web, tmp_path / "cache")[0].tolist()
        write_dataset(tmp_path / "files", seed=1)
        after = open_remote(web, tmp_path / "cache")[0].tolist()
        assert after == IndexedDataset(tmp_path / "files" / "corpus")[0].tolist()
        assert after != before


def test_no_token_of_a_file_that_changed_is_used_or_kept(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    with serve_files(tmp_path) as web:
        remote = open_remote(web, tmp_path / "cache")
        wanted = remote[0].tolist()
        write_dataset(tmp_path, seed=1)
        for i in (20, 39):
            with pytest.raises(FormatError, match="changed while it was read"):
                _ = remote[i]
        assert remote[0].tolist() == wanted
        [checksums] = (tmp_path / "cache").glob("*/checksums")
        assert np.flatnonzero(np.fromfile(checksums, np.uint64)).tolist() == [0]


@pytest.mark.parametrize("name", ["index.idx", "info.json", "tokenizer/identity.json"])
@pytest.mark.parametrize("is_removed", [True, False])
def test_a_damaged_copy_is_copied_again(tmp_path: Path, name: str, is_removed: bool) -> None:
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=60000)
    with IndexedWriter(tmp_path / "corpus", np.uint16, info=DatasetInfo(tokenizer.identity)) as out:
        out.add([1, 2, 3])
        out.end_document()
    tokenizer.save(tmp_path / "corpus.tokenizer")
    with serve_files(tmp_path) as web:
        first = open_remote(web, tmp_path / "cache")
        assert first.info is not None
        [copy] = (tmp_path / "cache").glob(f"*/{name}")
        content = bytearray(copy.read_bytes())
        content[len(content) // 2] ^= 64
        copy.write_bytes(content)
        if is_removed:
            copy.unlink()
        reopened = open_remote(web, tmp_path / "cache")
        assert reopened.info == first.info
        assert reopened[0].tolist() == [1, 2, 3]
        assert reopened.remote is not None
        assert open_tokenizer_folder(reopened.remote.tokenizer).identity == tokenizer.identity


def test_processes_check_the_copies_at_the_same_time(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a machine waited for the checks of the others, seconds for a large index."""
    open_remote(web, tmp_path)
    barrier = Barrier(3)
    checksum_of = remote_dataset._checksum_of

    def wait_for_others(path: Path) -> int:
        barrier.wait(timeout=10)
        return checksum_of(path)

    monkeypatch.setattr(remote_dataset, "_checksum_of", wait_for_others)
    requests = block_requests(web)
    with ThreadPoolExecutor(3) as threads:
        datasets = list(threads.map(lambda _: open_remote(web, tmp_path), range(3)))
    assert len({len(data) for data in datasets}) == 1
    assert block_requests(web) == requests


def test_a_server_that_fails_now_and_then(web: FileServer, files: Path, tmp_path: Path) -> None:
    remote = open_remote(web, tmp_path)
    web.failures = 2
    assert np.array_equal(remote[7], IndexedDataset(files / "corpus")[7])


def test_what_is_missing_is_named(web: FileServer, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"other\.idx: no such file"):
        IndexedDataset(RemotePath(f"{web.url}/other"), cache=tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MegaError, match="cannot be kept here.*--object-storage-cache-path"):
        IndexedDataset(RemotePath(f"{web.url}/corpus"), cache=tmp_path / "file")
