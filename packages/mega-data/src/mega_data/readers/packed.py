"""Files by their compression: the bytes they hold, and a word for the ones that are damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from mega_data.readers.magic import HEAD_BYTES, head_compression, name_compression
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, DamageError, FormatError

FileVersion = tuple[int, ...]  # of a file: its size, inode and time of change; () of one that is gone


def strip_extension(path: Path) -> str:
    """The name of a file without the ending of its compression."""
    return path.stem if name_compression(path) else path.name


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed.

    Raises:
        ConfigError: the library for it is not installed.
        DamageError: what is read is damaged.
    """
    with open_counted(path) as (file, _):
        yield file


@contextmanager
def open_counted(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """As `opened`, and how many bytes of the file on disk were read so far."""
    with path.open("rb", buffering=1 << 20) as raw, decompress(raw, path) as file:
        before = _version(os.fstat(raw.fileno()))
        yield file, raw.tell if raw.seekable() else lambda: 0
        if raw.seekable():
            check_version(path, before)


@contextmanager
def decompress(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """The bytes of an open file or pipe, decompressed by the ending of its name, else by its first bytes.

    Raises:
        ConfigError: the library for it is not installed.
        DamageError: what is read is damaged.
    """
    compression = name_compression(path) or head_compression(_peek(raw))
    damage_errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
    if compression == ".zst":
        damage_errors = (*damage_errors, import_for_file(path, "zstandard", "zst").ZstdError)
    if compression == ".lz4":
        damage_errors = (*damage_errors, RuntimeError)  # what its library raises
    try:
        with _open_decoder(path, compression, raw) as file:
            yield file
    except damage_errors as error:
        raise _damage_error(path, error) from None
    except OSError as error:
        if error.filename is None and error.errno is None:  # bz2's way to say the same
            raise _damage_error(path, error) from None
        raise


def _peek(raw: IO[bytes]) -> bytes:
    """The first bytes, which stay to be read."""
    return bytes(raw.peek(HEAD_BYTES)[:HEAD_BYTES]) if isinstance(raw, io.BufferedReader) else b""


def file_version(path: Path) -> FileVersion:
    """The version of the file that a name leads to."""
    return _version(path.stat()) if path.exists() else ()


def _version(stat: os.stat_result) -> FileVersion:
    return stat.st_size, stat.st_ino, stat.st_mtime_ns


def check_version(path: Path, before: FileVersion) -> None:
    """See that the name still leads to the file of a version.

    Raises:
        FormatError: another process wrote it, replaced it or removed it meanwhile.
    """
    if (current := file_version(path)) != before:
        raise changed_error(path, before[0], current[0] if current else None)


@contextmanager
def check_unchanged(path: Path) -> Iterator[None]:
    """Around the reading of a file, however it ends.

    Raises:
        FormatError: another process wrote it, replaced it or removed it meanwhile.
    """
    before = _version(path.stat())
    try:
        yield
    except (FormatError, OSError):
        check_version(path, before)
        raise
    check_version(path, before)


def changed_error(path: Path, before: int, now: int | None) -> FormatError:
    """What is wrong with a file that had `before` bytes and has `now`, None for one that is gone."""
    found = "no such file" if now is None else f"{now:,} bytes"
    hint = "let whoever writes it end, then give the command again"
    wanted = f"the {before:,} bytes it had, untouched"
    return FormatError(path, "changed while it was read", found=found, wanted=wanted, hint=hint)


def _open_decoder(path: Path, compression: str, raw: IO[bytes]) -> Any:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if compression == ".xz":
        return lzma.LZMAFile(raw)
    if compression == ".bz2":
        return bz2.BZ2File(raw)
    if compression == ".lz4":
        return import_for_file(path, "lz4.frame", "lz4").LZ4FrameFile(raw)
    if compression == ".zst":
        return io.BufferedReader(_ZstdReader(raw, import_for_file(path, "zstandard", "zst")), 1 << 20)
    return nullcontext(raw)


class _ZstdReader(io.RawIOBase):
    """The text of a .zst file; the library's own reader takes a file that was cut off for a whole one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw, self._frames = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not len(self._text) and (compressed := self._raw.read(1 << 17)):
            self._text = memoryview(self._decompress(compressed))
        if not len(self._text) and self._frame is not None:
            raise EOFError("the last frame ends early")
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def _decompress(self, compressed: bytes) -> bytes:
        text = list[bytes]()
        while compressed:
            frame = self._frame or self._frames.decompressobj()
            text.append(frame.decompress(compressed))
            compressed, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return b"".join(text)


def import_for_file(path: Path, module: str, extra: str) -> Any:
    """A library that a file needs, imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        what, hint = "needs a library that is not installed", install_hint("mega-data", extra)
        raise ConfigError(path, what, wanted=module.partition(".")[0], hint=hint) from None


def _damage_error(path: Path, error: Exception) -> DamageError:
    return DamageError(path, "damaged", found=str(error) or type(error).__name__, hint="copy the file again")
