"""Files by their compression: the bytes they hold, and a word for the ones that are damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from mega_schema.errors import ConfigError, FormatError

PACKED = (".gz", ".zst", ".xz", ".bz2", ".lz4")


def unpacked_name(path: Path) -> str:
    """The name of a file without the ending of its compression."""
    return path.stem if path.suffix in PACKED else path.name


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed by the ending of its name.

    Raises:
        ConfigError: the library for it is not installed.
        FormatError: what is read is damaged.
    """
    with counted(path) as (file, _):
        yield file


@contextmanager
def counted(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """As `opened`, and how many bytes of the file on disk were read so far."""
    damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
    if path.suffix == ".zst":
        damage = (*damage, library(path, "zstandard", "zst").ZstdError)
    if path.suffix == ".lz4":
        damage = (*damage, RuntimeError)  # what its library raises
    with path.open("rb", buffering=1 << 20) as raw:
        try:
            with _text(path, raw) as file:
                yield file, raw.tell
        except damage as error:
            raise _damaged(path, error) from None
        except OSError as error:
            if error.filename is None and error.errno is None:  # bz2's way to say the same
                raise _damaged(path, error) from None
            raise


def _text(path: Path, raw: IO[bytes]) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if path.suffix == ".bz2":
        return bz2.BZ2File(raw)
    if path.suffix == ".lz4":
        return library(path, "lz4.frame", "lz4").LZ4FrameFile(raw)
    if path.suffix == ".zst":
        return io.BufferedReader(_Frames(raw, library(path, "zstandard", "zst")), 1 << 20)
    return raw


class _Frames(io.RawIOBase):
    """The text of a .zst file; the library's own reader takes a file that was cut off for a whole one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw, self._frames = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not len(self._text) and (packed := self._raw.read(1 << 17)):
            self._text = memoryview(self._unpacked(packed))
        if not len(self._text) and self._frame is not None:
            raise EOFError("the last frame ends early")
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def _unpacked(self, packed: bytes) -> bytes:
        text = list[bytes]()
        while packed:
            frame = self._frame or self._frames.decompressobj()
            text.append(frame.decompress(packed))
            packed, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return b"".join(text)


def library(path: Path, module: str, extra: str) -> Any:
    """A library that a file needs, imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        what, hint = "needs a library that is not installed", f"pip install 'mega-data[{extra}]'"
        raise ConfigError(path, what, wanted=module.partition(".")[0], hint=hint) from None


def _damaged(path: Path, error: Exception) -> FormatError:
    return FormatError(path, "damaged", found=str(error) or type(error).__name__, hint="copy the file again")
