"""A file as blocks, from any position that a block ended at."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from mega_data.readers.blocks import Block, Lines, PlainText
from mega_data.readers.inputs import Input
from mega_schema.errors import ConfigError, FormatError

BLOCK_BYTES = 1 << 20
UNITS = ("file", "paragraph", "line")
LONGEST_TEXT = 1 << 28  # bytes that one document may have, and so one block


def blocks(
    given: Input, start: int = 0, *, keys: Sequence[str], size: int = BLOCK_BYTES, unit: str = "file"
) -> Iterator[Block]:
    """The blocks of an input after position `start`, of about `size` bytes each.

    Args:
        start: 0, or the `end` of an earlier block of the same input: in bytes of text, or rows of a table.
        keys: columns to read of a table.
        unit: what a document of plain text is, one of UNITS.

    Raises:
        FormatError: the file is damaged, or a line or text is longer than LONGEST_TEXT.
        ConfigError: a library that the form needs is not installed.
    """
    if given.form == "table":
        from mega_data.readers.tables import batches

        yield from batches(given.path, start, keys, size)
    elif given.form == "jsonl" and not given.packing and not given.stdin:
        yield from _places(given.path, start, size)
    else:
        whole = given.form == "text" and unit == "file"
        ending = b"\n\n" if given.form == "text" and unit == "paragraph" else b"\n"
        with _opened(given) as (file, consumed):
            _skip(file, start)
            before = 0
            for end, held in _pieces(file, start, LONGEST_TEXT if whole else size, ending, given.path, whole):
                now = consumed()
                if given.form == "text":
                    yield PlainText(end, now - before, held, unit)
                else:
                    yield Lines(given.path, end - len(held), end, now - before, held)
                before = now


def _places(path: Path, start: int, size: int) -> Iterator[Block]:
    """Where blocks of whole lines lie: the workers read them, so that no line goes through a pipe."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while start < end:
            file.seek(min(start + size, end))
            rest = file.readline(LONGEST_TEXT)
            if len(rest) >= LONGEST_TEXT:
                raise _too_long(path)
            stop = file.tell()
            yield Lines(path, start, stop, stop - start)
            start = stop


def _pieces(
    file: IO[bytes], at: int, size: int, ending: bytes, path: Path, whole: bool
) -> Iterator[tuple[int, bytes]]:
    """Bytes of about `size` that stop after `ending`, each with the position of its end."""
    held = b""
    while more := _read(file, size, path):
        held += more
        if whole:
            if len(held) >= LONGEST_TEXT:
                raise _too_long(path)
            continue
        cut = held.rfind(ending) + len(ending)
        if cut >= len(ending):
            at += cut
            yield at, held[:cut]
            held = held[cut:]
        elif len(held) >= LONGEST_TEXT:
            raise _too_long(path)
    if held:
        yield at + len(held), held


def _read(file: IO[bytes], size: int, path: Path) -> bytes:
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(path, error) from None  # bz2's way to say it


def _skip(file: IO[bytes], size: int) -> None:
    while size > 0 and (passed := len(file.read(min(size, BLOCK_BYTES)))):
        size -= passed


@contextmanager
def _opened(given: Input) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The bytes of an input, decompressed, and how many bytes of the file they took so far."""
    if given.stdin:
        yield sys.stdin.buffer, lambda: 0
        return
    with given.path.open("rb", buffering=1 << 20) as raw:
        if given.packing == ".zst":
            yield cast("IO[bytes]", _Zst(raw, given.path)), raw.tell
        elif given.packing == ".gz":
            with gzip.GzipFile(fileobj=raw) as file:
                yield cast("IO[bytes]", file), raw.tell
        elif given.packing == ".xz":
            with lzma.LZMAFile(raw) as packed:
                yield cast("IO[bytes]", packed), raw.tell
        elif given.packing == ".bz2":
            with bz2.BZ2File(raw) as older:
                yield cast("IO[bytes]", older), raw.tell
        else:
            yield raw, raw.tell


class _Zst:
    """Zstandard frames; the library's own reader takes a file that was cut off for a whole one."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            hint = "pip install 'mega-data[zst]'"
            what = "needs a library that is not installed"
            raise ConfigError(path, what, wanted="zstandard", hint=hint) from None
        self._frames, self._error = zstandard.ZstdDecompressor(), zstandard.ZstdError
        self._raw, self._path, self._ready = raw, path, b""
        self._frame: Any = None

    def read(self, size: int) -> bytes:
        parts, held = [self._ready], len(self._ready)
        self._ready = b""
        while held < size and (more := self._more()):
            parts.append(more)
            held += len(more)
        whole = b"".join(parts)
        self._ready = whole[size:]
        return whole[:size]

    def _more(self) -> bytes:
        """Some more bytes of text, none at the end of the file."""
        while packed := self._raw.read(1 << 17):
            text = b""
            while packed:
                if self._frame is None:
                    self._frame = self._frames.decompressobj()
                try:
                    text += self._frame.decompress(packed)
                except self._error as error:
                    raise _damaged(self._path, error) from None
                packed = self._frame.unused_data if self._frame.eof else b""
                if self._frame.eof:
                    self._frame = None
            if text:
                return text
        if self._frame is not None:
            raise _damaged(self._path, EOFError("the file ends within a frame"))
        return b""


def _damaged(path: Path, error: Exception) -> FormatError:
    return FormatError(path, "damaged", found=str(error) or type(error).__name__, hint="copy the file again")


def _too_long(path: Path) -> FormatError:
    what = f"a line or text of more than {LONGEST_TEXT >> 20} MiB"
    return FormatError(path, what, hint="split it; plain text also with --text-unit paragraph or line")
