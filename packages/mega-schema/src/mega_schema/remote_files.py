"""Files of object stores and web servers as paths: `s3://`, `gs://`, `az://`, `hf://`, `http://`, `https://`.

A `RemotePath` has the methods of pathlib's paths that readers use: `open`, `stat`, `is_file` and others.
It is read by ranges, several at a time while a reader goes forward, and a failed request is repeated. The
libraries (fsspec and one for each store) are optional, and read their own environment variables for
credentials and endpoints.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path, PosixPath
from types import MappingProxyType
from typing import IO, Any, Final, Self, TypeVar

from mega_schema.errors import AccessError, ConfigError, FormatError, MegaError
from mega_schema.urls import check_host, format_url, url_scheme

# scheme -> the library of its file system
REMOTE_SCHEMES: Final = MappingProxyType(
    {
        "s3": "s3fs",
        "gs": "gcsfs",
        "az": "adlfs",
        "abfs": "adlfs",
        "hf": "huggingface_hub",
        "http": "aiohttp",
        "https": "aiohttp",
    }
)
WRITABLE_SCHEMES: Final = ("s3", "gs", "az", "abfs")
_NOT_IN_AN_EXTRA: Final = ("gcsfs", "adlfs")
_PROTOCOLS: Final = MappingProxyType({"az": "abfs", "https": "http"})  # names of fsspec
_FIRST_BYTES: Final = 1 << 16  # of the first range after a seek; ranges grow while a reader goes forward
_MAX_BYTES: Final = 8 << 20  # of a range
_AHEAD: Final = 4  # ranges that are requested before they are read
_TRIES: Final = 5  # of a request
_FIRST_WAIT: Final = 0.25  # seconds before the second try; doubles, up to 30

T = TypeVar("T")


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a RemotePath, or a text a URL of REMOTE_SCHEMES."""
    if isinstance(path, Path):
        return isinstance(path, RemotePath)
    return url_scheme(path) in REMOTE_SCHEMES and "://" in path


def path_of(text: str) -> Path:
    """Return the path that a text names, a RemotePath for a URL of REMOTE_SCHEMES; see `check_host`."""
    return RemotePath(check_host("", text)) if is_remote(text) else Path(text)


def check_libraries(option: str, url: str | Path, hint: str) -> None:
    """Check that the libraries for a URL are installed.

    Args:
        option: the command-line option that names the URL.
        hint: the command that installs fsspec and its file systems for S3, web servers and Hugging Face.

    Raises:
        ConfigError: one is not.
    """
    library = REMOTE_SCHEMES[url_scheme(url)]
    for name in ("fsspec", library):
        try:
            import_module(name)
        except ImportError:
            what = f"{url_scheme(url)}:// needs a library that is not installed"
            command = f"pip install {name}" if name in _NOT_IN_AN_EXTRA else hint
            raise ConfigError(option, what, wanted=name, hint=command) from None


class RemotePath(PosixPath):
    """A file of an object store or web server. `str` of it is its URL.

    The answer to the first `stat` is kept, so that a path describes one version of the file.
    """

    def __str__(self) -> str:
        return format_url(super().__str__())

    @property
    def scheme(self) -> str:
        return url_scheme(super().__str__())

    @property
    def key(self) -> str:
        """Return the name of the file in its file system of fsspec."""
        url = str(self)
        return url if self.scheme in ("http", "https") else url.partition("://")[2]

    @property
    def name(self) -> str:
        """Return the last part of the path, without the query of a web address."""
        name = super().name
        return name.partition("?")[0] if self.scheme in ("http", "https") else name

    def file_system(self) -> Any:
        """Return fsspec's file system; it keeps one for each process."""
        fsspec = import_module("fsspec")
        # listings would hide files that another process wrote
        return fsspec.filesystem(_PROTOCOLS.get(self.scheme, self.scheme), use_listings_cache=False)

    def as_posix(self) -> str:
        return str(self)

    def absolute(self) -> Self:
        return self

    def resolve(self, strict: bool = False) -> Self:
        return self

    def is_symlink(self) -> bool:
        return False

    def is_fifo(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return False

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.exists()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        try:
            self.stat()
        except OSError:
            return False
        return True

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and version of the file. `st_mtime_ns` is a hash of the version that the store names.

        Raises:
            FileNotFoundError: there is no such file.
            MegaError: the place cannot be reached, or does not tell the size.
        """
        known: os.stat_result | None = self.__dict__.get("_stat")
        if known is None:
            known = self.__dict__["_stat"] = self.read_stat()
        return known

    def read_stat(self, tries: int = _TRIES) -> os.stat_result:
        """Ask the place for size and version, as `stat` does the first time."""
        info = request(self, lambda: self.file_system().info(self.key), tries=tries)
        if info.get("type") == "directory":
            raise IsADirectoryError(21, "Is a directory", str(self))
        if info.get("size") is None:
            hint = "copy the file to this machine"
            raise MegaError(self, "the server does not tell the size of the file", hint=hint)
        return _stat_of_info(info)

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """Open the file for reading.

        Raises:
            FileNotFoundError: there is no such file.
            MegaError: the place cannot be reached.
        """
        if mode not in ("r", "rb"):
            raise io.UnsupportedOperation(f"{self}: mode {mode}")
        raw = io.BufferedReader(RangeReader(self), buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding or "utf-8", errors, newline)


# the first of these that a file system of fsspec knows tells versions apart
_VERSION_KEYS: Final = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified", "last_modified", "mtime")


def _stat_of_info(info: Mapping[str, Any]) -> os.stat_result:
    version = next((str(info[name]) for name in _VERSION_KEYS if info.get(name) is not None), "")
    mtime = int.from_bytes(hashlib.sha256(version.encode()).digest()[:6], "big")
    values = (stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, info["size"], 0, 0, 0)
    return os.stat_result(values, {"st_mtime_ns": mtime, "st_atime_ns": 0, "st_ctime_ns": 0})


def find_remote_files(url: str, is_readable: Callable[[str], bool]) -> list[RemotePath]:
    """Return the files of a URL, sorted: itself, the matches of a glob, or all files below a folder.

    Web servers have no folders, and globs only with `*` where they list their files as a page of links.

    Args:
        is_readable: whether a file below a folder is one to return, by its name below the folder.

    Raises:
        MegaError: the place cannot be reached.
    """
    try:
        return _find(RemotePath(url), url, is_readable)
    except FileNotFoundError:  # no such bucket
        return []


def _find(path: RemotePath, url: str, is_readable: Callable[[str], bool]) -> list[RemotePath]:
    is_web = path.scheme in ("http", "https")
    magic = "*" if is_web else "*?["  # a question mark begins the query of a web address
    if any(character in url for character in magic):
        infos = request(url, lambda: path.file_system().glob(path.key, detail=True))
        return [_listed_path(path.scheme, info) for _, info in sorted(infos.items()) if _is_file(info)]
    if not url.endswith("/") and path.is_file():
        return [path]
    if is_web:
        return []
    folder = path.key.rstrip("/")
    infos = request(url, lambda: path.file_system().find(folder, detail=True))
    return [
        _listed_path(path.scheme, info)
        for name, info in sorted(infos.items())
        if _is_file(info) and is_readable(name.removeprefix(folder).lstrip("/"))
    ]


def _is_file(info: Mapping[str, Any]) -> bool:
    return info.get("type") == "file" and not str(info["name"]).endswith("/")


def _listed_path(scheme: str, info: Mapping[str, Any]) -> RemotePath:
    """Return the path of a file in a listing; its stat needs no more requests."""
    name = str(info["name"])
    path = RemotePath(name if scheme in ("http", "https") else f"{scheme}://{name}")
    if info.get("size") is not None:
        path.__dict__["_stat"] = _stat_of_info(info)
    return path


class RangeReader(io.RawIOBase):
    """The bytes of a remote file. While it is read forward, the next ranges are requested in threads.

    A file that changes while it is read is an error at its end.
    """

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self._size = path.stat().st_size
        self._position = 0
        self._start = 0  # of `_data`
        self._data = b""
        self._pending = deque[tuple[int, int, Future[bytes]]]()  # consecutive ranges after `_data`
        self._length = _FIRST_BYTES // 2
        self._threads: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        if not 0 <= self._position - self._start < len(self._data):
            self._load()
        begin = self._position - self._start
        data = self._data[begin : begin + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        if self._position == self._size:
            check_unchanged(self.path)
        return len(data)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._pending.clear()
        self._data = b""
        super().close()

    def _load(self) -> None:
        """Read the range that begins at the position, and request the next ones."""
        is_next = bool(self._data) and self._position == self._start + len(self._data)
        if is_next and self._pending:
            self._start, _, future = self._pending.popleft()
            self._data = future.result()
        else:
            for _, _, future in self._pending:
                future.cancel()
            self._pending.clear()
            self._length = min(2 * self._length, _MAX_BYTES) if is_next else _FIRST_BYTES
            end = min(self._position + self._length, self._size)
            self._data = read_range(self.path, self._position, end)
            self._start = self._position
        if is_next:
            self._request_next()

    def _request_next(self) -> None:
        self._threads = self._threads or ThreadPoolExecutor(_AHEAD)
        while len(self._pending) < _AHEAD:
            start = self._pending[-1][1] if self._pending else self._start + len(self._data)
            self._length = min(2 * self._length, _MAX_BYTES)
            end = min(start + self._length, self._size)
            if start >= end:
                return
            self._pending.append((start, end, self._threads.submit(read_range, self.path, start, end)))


def read_range(path: RemotePath, start: int, end: int, *, tries: int = _TRIES) -> bytes:
    """Return bytes `start` to `end` of a file, see `request`.

    Raises:
        FileNotFoundError: there is no such file.
        MegaError: the place cannot be reached, or does not send ranges.
    """

    def read() -> bytes:
        data: bytes = path.file_system().cat_file(path.key, start=start, end=end)
        if len(data) > end - start:
            hint = "copy the file to this machine"
            raise MegaError(path, "the server does not send ranges of the file", hint=hint)
        if len(data) < end - start:
            raise OSError(f"{len(data):,} of {end - start:,} bytes at byte {start:,}")
        return data

    return request(path, read, tries=tries)


def check_unchanged(path: RemotePath, *, tries: int = _TRIES) -> None:
    """Check that a file still has the version that its path describes.

    Raises:
        FormatError: it has another one.
        MegaError: the place cannot be reached.
    """
    opened, current = path.stat(), path.read_stat(tries)
    if (current.st_size, current.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
        hint = "wait until the other process has finished, then run the command again"
        found, wanted = f"{current.st_size:,} bytes", f"the {opened.st_size:,} bytes it had, untouched"
        raise FormatError(path, "changed while it was read", found=found, wanted=wanted, hint=hint)


def request(url: object, send: Callable[[], T], *, tries: int = _TRIES) -> T:
    """Send a request, and repeat it after an error that may pass.

    Raises:
        FileNotFoundError: there is no such file.
        MegaError: it failed each time, or may not be sent.
    """
    wait = _FIRST_WAIT
    for tries_left in reversed(range(tries)):
        try:
            return send()
        except FileNotFoundError as error:
            if not _is_connection_error(error.__cause__):
                raise FileNotFoundError(2, "No such file", str(url)) from None
            _check_attempts(url, tries, tries_left, error.__cause__)
        except PermissionError as error:
            hint = "are the credentials set, as for the place's own programs?"
            raise AccessError(url, "access is denied", found=_describe(error), hint=hint) from None
        except (NotImplementedError, IsADirectoryError, MegaError):
            raise  # repeating gives the same answer
        except Exception as error:  # errors of many libraries without a common base class
            if (status := getattr(error, "status", 0)) in (401, 403):
                raise AccessError(url, "access is denied", found=f"status {status}") from None
            if type(error).__name__ == "NoCredentialsError":
                hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                raise MegaError(url, "needs credentials", found=_describe(error), hint=hint) from None
            _check_attempts(url, tries, tries_left, error)
        time.sleep(wait)
        wait = min(2 * wait, 30.0)
    raise AssertionError


def _is_connection_error(cause: BaseException | None) -> bool:
    """Return whether fsspec reported a failed connection, or a status other than 404, as a missing file."""
    return type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", 0) != 404


def _check_attempts(url: object, tries: int, tries_left: int, error: BaseException | None) -> None:
    if not tries_left:
        hint = "is the network there? Run the same command again"
        raise MegaError(url, f"failed {tries} times", found=_describe(error), hint=hint) from None


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
