"""A dataset in an object store: its index is copied once, its tokens are read by ranges and kept.

    CACHE/PREFIX-DIGEST/index.idx, info.json, tokenizer/    copies
    CACHE/PREFIX-DIGEST/copies.json                         CRC-32 of each copy; written last
    CACHE/PREFIX-DIGEST/blocks                              the .bin; sparse, with the blocks that were read
    CACHE/PREFIX-DIGEST/checksums                           CRC-32 + 1 of each block, uint64; 0: not read yet

The digest covers the URL and the version of both files, so that a dataset that was replaced is read again.
All processes of a machine share the folder. A block is written before its checksum, and one that does not
match it is read again, as are the copies; so neither a killed process nor a crash of the machine leaves wrong
tokens. A block is used after the store has told once more that the file has the version of the digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write, write_at, write_text
from mega_schema.dataset.dataset_info import sibling
from mega_schema.errors import FormatError, MegaError
from mega_schema.file_lock import lock_file
from mega_schema.remote_files import (
    RemotePath,
    check_libraries,
    check_unchanged,
    find_remote_files,
    read_range,
)
from mega_schema.tokenizer.files import COMPANION_FILES
from mega_schema.tokenizer.identity import IDENTITY

log = logging.getLogger("mega.schema")

BLOCK: Final = 1 << 16  # bytes
_MAX_RANGE: Final = 64  # blocks of a request
_COPIED_BYTES: Final = 1 << 22  # at a time
_THREADS: Final = 16  # requests at a time
_MAX_READ: Final = 1024  # blocks that a read waits for at a time
_MEMORY_BLOCKS: Final = 4096  # kept where the disk is full
_TRIES: Final = 13  # of a request: a run of many machines waits about three minutes for the store

# of a tokenizer's folder, where a place does not list it
TOKENIZER_FILES: Final = (IDENTITY, "tokenizer.json", "tokenizer.model", *COMPANION_FILES)

ByteRange = tuple[int, int]


def default_cache() -> Path:
    """Return the folder for copies of remote datasets, of this user on this machine."""
    return Path(tempfile.gettempdir()) / f"mega-object-storage-{os.getuid()}"


class RemoteDatasetFiles:
    """The local copies of a remote dataset's small files.

    Attributes:
        index, info: the copies of PREFIX.idx and PREFIX.json; `info` may not exist.
        payload: the .bin.
    """

    def __init__(self, prefix: RemotePath, cache: Path) -> None:
        """Copy the files that are not there yet.

        Raises:
            ConfigError: a library for the URL is not installed.
            FormatError: PREFIX.idx or PREFIX.bin is missing.
            MegaError: the place cannot be reached, or the folder cannot be written.
        """
        check_libraries(str(prefix), prefix, install_hint("mega-data", "remote"))
        remote_index, remote_payload = sibling(prefix, ".idx"), sibling(prefix, ".bin")
        assert isinstance(remote_payload, RemotePath)
        stats = []
        for path in (remote_index, remote_payload):
            try:
                stats.append(path.stat())
            except FileNotFoundError:
                raise FormatError(path, "no such file", wanted="PREFIX.idx and PREFIX.bin") from None
        versions = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        digest = hashlib.sha256(repr((str(prefix), versions)).encode()).hexdigest()[:16]
        self.folder = cache / f"{prefix.name}-{digest}"
        self.index = self.folder / "index.idx"
        self.info = self.folder / "info.json"
        self.tokenizer = self.folder / "tokenizer"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.folder.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "belongs to another user")
            self._ensure_copies(prefix, remote_index)
        except OSError as error:
            raise _cache_error(self.folder, error) from None
        self.payload = RemotePayload(remote_payload, self.folder)

    def _ensure_copies(self, prefix: RemotePath, remote_index: Path) -> None:
        """Copy the small files, unless there are undamaged copies. One rank copies; all check at once."""
        record = self.folder / "copies.json"
        while True:
            version = _record_version(record)
            if _has_copies(record):
                return
            with (self.folder / "lock").open("wb") as lock:
                lock_file(lock.fileno(), self.folder, wait=True)
                if _record_version(record) == version:  # no other rank has copied them since
                    self._copy(record, prefix, remote_index)
                    return

    def _copy(self, record: Path, prefix: RemotePath, remote_index: Path) -> None:
        """Copy the small files; the record of them is written last."""
        record.unlink(missing_ok=True)
        copies = {self.index: remote_index}
        if (info := sibling(prefix, ".json")).is_file():
            copies[self.info] = info
        tokenizer = sibling(prefix, ".tokenizer")
        if prefix.scheme in ("http", "https"):  # they have no folders
            files = [tokenizer / name for name in TOKENIZER_FILES]
            files = [path for path in files if path.is_file()]
        else:
            files = [*find_remote_files(f"{tokenizer}/", lambda name: "/" not in name)]
        copies |= {self.tokenizer / path.name: path for path in files}
        checksums = {}
        for copy, source in copies.items():
            copy.parent.mkdir(exist_ok=True)
            with atomic_write(copy) as partial, source.open("rb") as remote, partial.open("wb") as local:
                shutil.copyfileobj(remote, local, _COPIED_BYTES)
            checksums[str(copy.relative_to(self.folder))] = _checksum_of(copy)
        write_text(record, json.dumps(checksums, indent=1) + "\n")


class RemotePayload:
    """The bytes of a remote .bin. Reads and prefetches may come from several threads.

    Attributes:
        nbytes: its size.
    """

    def __init__(self, path: RemotePath, folder: Path) -> None:
        """Open the cache of a .bin in a folder.

        Raises:
            OSError: it cannot be written.
        """
        self._path = path
        self._folder = folder
        self.nbytes: int = path.stat().st_size
        self._blocks_file = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
        self._sums_file = os.open(folder / "checksums", os.O_RDWR | os.O_CREAT, 0o600)
        self._lock = Lock()
        self._requests: dict[int, Future[None]] = {}  # by block
        self._memory: OrderedDict[int, bytes] = OrderedDict()  # blocks that the disk has no space for
        self._is_checked = np.zeros(-(-self.nbytes // BLOCK), np.bool_)  # blocks on disk that are right
        self._check_lock = Lock()
        self._check_time = time.monotonic()  # at which the last check began that found no other version
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote-dataset")

    def __del__(self) -> None:
        for name in ("_blocks_file", "_sums_file"):
            if name in self.__dict__:
                os.close(self.__dict__[name])

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end`.

        Raises:
            MegaError: the place cannot be reached, or the file changed there.
        """
        if begin >= end:
            return b""
        first, last = begin // BLOCK, (end - 1) // BLOCK + 1
        if last - first > _MAX_READ:
            middle = (first + _MAX_READ) * BLOCK
            return self.read(begin, middle) + self.read(middle, end)
        while True:
            requests = self._request_blocks(range(first, last))
            for request in requests:
                request.result()
            parts = [self._load_block(block) for block in range(first, last)]
            if all(part is not None for part in parts):
                break
        data = b"".join(part for part in parts if part is not None)
        return data[begin - first * BLOCK : end - first * BLOCK]

    def prefetch(self, ranges: Iterable[ByteRange]) -> None:
        """Begin to read ranges of bytes; errors are raised by `read`."""
        blocks = {
            block
            for begin, end in ranges
            if 0 <= begin < end <= self.nbytes  # `read` reports others
            for block in range(begin // BLOCK, (end - 1) // BLOCK + 1)
        }
        self._request_blocks(sorted(blocks))

    def _request_blocks(self, blocks: Sequence[int]) -> list[Future[None]]:
        """Request the blocks that are missing, and return the requests on which the blocks depend."""
        missing = [block for block in blocks if not self._has_block(block)]
        with self._lock:
            new = [block for block in missing if block not in self._requests]
            for run in _consecutive(new):
                future = self._threads.submit(self._fetch_blocks, run)
                self._requests.update(dict.fromkeys(run, future))
            return list(dict.fromkeys(self._requests[block] for block in missing if block in self._requests))

    def _fetch_blocks(self, blocks: range) -> None:
        """Read consecutive blocks from the store and keep them."""
        begin, end = blocks.start * BLOCK, min(blocks.stop * BLOCK, self.nbytes)
        try:
            data = read_range(self._path, begin, end, tries=_TRIES)
            self._check_unchanged()
            for block in blocks:
                first = block * BLOCK - begin
                self._store_block(block, data[first : first + BLOCK])
        finally:
            with self._lock:
                for block in blocks:
                    del self._requests[block]

    def _check_unchanged(self) -> None:
        """Return after a check of the version that began after this call; several calls share one."""
        called = time.monotonic()
        with self._check_lock:
            if self._check_time <= called:
                began = time.monotonic()
                check_unchanged(self._path, tries=_TRIES)
                self._check_time = began

    def _store_block(self, block: int, data: bytes) -> None:
        try:
            write_at(self._blocks_file, memoryview(data), block * BLOCK)
            checksum = np.uint64(zlib.crc32(data) + 1).tobytes()
            write_at(self._sums_file, memoryview(checksum), block * len(checksum))
            self._is_checked[block] = True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise _cache_error(self._folder, error) from None
            with self._lock:
                if not self._memory:
                    log.warning("%s is full: further tokens of %s are not kept", self._folder, self._path)
                self._memory[block] = data
                while len(self._memory) > _MEMORY_BLOCKS:
                    self._memory.popitem(last=False)

    def _has_block(self, block: int) -> bool:
        return bool(self._is_checked[block]) or block in self._memory or self._load_block(block) is not None

    def _load_block(self, block: int) -> bytes | None:
        """Return a block that is on disk or in memory, else None."""
        with self._lock:
            if (data := self._memory.get(block)) is not None:
                return data
        size = min(BLOCK, self.nbytes - block * BLOCK)
        if self._is_checked[block]:
            return os.pread(self._blocks_file, size, block * BLOCK)
        checksum = os.pread(self._sums_file, 8, block * 8)
        if len(checksum) < 8 or not (wanted := int(np.frombuffer(checksum, np.uint64)[0])):
            return None
        data = os.pread(self._blocks_file, size, block * BLOCK)
        if zlib.crc32(data) + 1 != wanted:
            return None
        self._is_checked[block] = True
        return data


class RemoteTokens:
    """The ids of a remote .bin, sliced as an array of them.

    Attributes:
        nbytes: size of the .bin.
    """

    def __init__(self, payload: RemotePayload, dtype: np.dtype[Any]) -> None:
        self.payload = payload
        self.dtype = dtype
        self.nbytes = payload.nbytes

    def __getitem__(self, ids: slice) -> NDArray[Any]:
        begin, end = ids.start * self.dtype.itemsize, ids.stop * self.dtype.itemsize
        return np.frombuffer(self.payload.read(begin, end), self.dtype)


def _consecutive(blocks: Sequence[int]) -> Iterator[range]:
    """Yield sorted blocks as ranges of consecutive ones, each for a request."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1 or i - first == _MAX_RANGE:
            yield range(blocks[first], blocks[i - 1] + 1)
            first = i


def _record_version(record: Path) -> tuple[int, int] | None:
    """Return what changes when a record is written again; None if there is none."""
    try:
        stat = record.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _has_copies(record: Path) -> bool:
    """Return whether the copies in a record are as they were written."""
    try:
        checksums = json.loads(record.read_bytes())
        return all(_checksum_of(record.parent / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError):
        return False


def _checksum_of(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_COPIED_BYTES):
            checksum = zlib.crc32(data, checksum)
    return checksum


def _cache_error(folder: Path, error: OSError) -> MegaError:
    return MegaError(
        folder,
        "tokens of a remote dataset cannot be kept here",
        found=error.strerror,
        hint="--object-storage-cache-path FOLDER",
    )
