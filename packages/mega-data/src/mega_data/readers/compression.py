"""Compressed files: their text as one stream, or piece by piece with each piece's place in the file.

`open_decompressed` raises at damage. `read_pieces` yields a DamagedRange and continues at the next readable
place: the next byte of a plain file, block of bz2, member of gz, frame or stream of the others.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from mega_data.readers.magic import HEAD_BYTES, detect_compression, head_compression, name_compression
from mega_data.readers.versions import check_version, version_of_stat
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, DamageError

SPLITTABLE = ("", ".bz2")  # what can be read from any place on
_CHUNK = 1 << 20
_MAX_FRAME_TEXT = 1 << 22  # bytes of text
_READ_BYTES = 1 << 10  # bytes unpacked at a time: what a bomb makes of them has to fit into memory
_GZIP, _XZ, _ZSTD, _LZ4 = b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that follows what was before it without a gap.

    Attributes:
        at: byte of the file; of a packed one where that which was unpacked begins.
    """

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes that cannot be read, or not as what they should be.

    Attributes:
        at, until: bytes of the file as it lies on disk.
        why: as whoever read it says it.
        reason: one of few, as it is counted.
    """

    start: int
    end: int
    why: str
    reason: str = "damaged"


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
        before = version_of_stat(os.fstat(raw.fileno()))
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


def read_pieces(path: Path, start: int = 0, edge: int | None = None) -> Iterator[TextPiece | DamagedRange]:
    """The text of a file that begins at byte `start` or later, and the gaps.

    Args:
        start: not 0 only for those of CUTTABLE.
        edge: a byte of a plain file at which a piece is to begin.

    Raises:
        ConfigError: a library that the compression needs is not installed.
    """
    kind = detect_compression(path)
    if kind == ".bz2":
        from mega_data.readers.bzip2 import read_bzip2

        return read_bzip2(path, start)
    if kind == ".gz":
        return _read_frames(path, _GZIP, lambda: zlib.decompressobj(31), zlib.error)
    if kind == ".xz":
        return _read_frames(path, _XZ, lzma.LZMADecompressor, lzma.LZMAError)
    if kind == ".zst":
        zstandard = import_for_file(path, "zstandard", "zst")
        return _read_frames(path, _ZSTD, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    if kind == ".lz4":
        lz4 = import_for_file(path, "lz4.frame", "lz4")
        return _read_frames(path, _LZ4, lz4.LZ4FrameDecompressor, RuntimeError)
    return _read_plain(path, start, edge)


def _read_plain(path: Path, start: int, edge: int | None) -> Iterator[TextPiece | DamagedRange]:
    with path.open("rb") as file:
        file.seek(start)
        position = start
        while text := file.read(
            min(_CHUNK, edge - position) if edge is not None and position < edge else _CHUNK
        ):
            yield TextPiece(position, text)
            position += len(text)


def _read_frames(
    path: Path, magic: bytes, open_frame: Callable[[], Any], damage_error: type[Exception]
) -> Iterator[TextPiece | DamagedRange]:
    """The text of a file of frames that each begin with `magic`.

    The checksum of a frame comes after its text. Frames of up to _HELD bytes of text are given when it was
    right, larger ones as they are read: what a gap in one comes after may be damaged as well.
    """
    with path.open("rb") as file:
        frame: Any = None
        pending = list[bytes]()  # text of the frame not yet given
        position = frame_start = size = 0  # of what is unpacked now, and of its frame; of what is held
        while compressed := file.read(_READ_BYTES):
            while compressed:
                if frame is None:
                    stripped = (
                        compressed.lstrip(b"\0") if magic in (_GZIP, _XZ) else compressed
                    )  # those may be padded
                    position, compressed = position + len(compressed) - len(stripped), stripped
                    if not compressed:
                        break
                    frame, frame_start, pending, size = open_frame(), position, [], 0
                try:
                    text = frame.decompress(compressed)
                except damage_error as error:
                    resume_at = _find_magic(file, magic, max(position, frame_start + 1))
                    yield DamagedRange(frame_start if pending else position, resume_at, str(error))
                    position, compressed, frame = resume_at, b"", None
                    file.seek(resume_at)
                    break
                unused = (frame.unused_data or b"") if frame.eof else b""
                pending.append(text)
                size += len(text)
                if frame.eof or size > _MAX_FRAME_TEXT:
                    if size:
                        yield TextPiece(frame_start, b"".join(pending))
                    pending = []
                position, compressed = position + len(compressed) - len(unused), unused
                frame = None if frame.eof else frame
        if frame is not None:
            yield DamagedRange(frame_start, position, "the file ends within what began here")


def _find_magic(file: IO[bytes], magic: bytes, position: int) -> int:
    """Where a frame may begin, from a byte on; the end of the file where none does."""
    file.seek(position)
    buffer = b""
    while chunk := file.read(_CHUNK):
        buffer += chunk
        index = buffer.find(magic)
        if index >= 0:
            return position + index
        position += max(0, len(buffer) - len(magic) + 1)
        buffer = buffer[-len(magic) + 1 :]
    return position + len(buffer)


class ResumableStream:
    """Pieces as a file to read from, up to the next gap; it goes on behind the gap once `gap` is None again.

    Attributes:
        gap: where reading has stopped, None at the end of the file.
    """

    def __init__(self, parts: Iterator[TextPiece | DamagedRange]) -> None:
        self.gap: DamagedRange | None = None
        self._places = deque[tuple[int, int]]([(0, 0)])  # where pieces begin: of the text, of the file
        self._parts, self._held = parts, b""
        self._first = self._at = 0  # of the text: where `_held` begins, and what is read next

    def read(self, size: int) -> bytes:
        while self._at >= self._first + len(self._held):
            piece = None if self.gap else next(self._parts, None)
            if isinstance(piece, DamagedRange):
                self.gap = piece
            if not isinstance(piece, TextPiece):
                return b""
            tail = self._held[-_CHUNK:]
            self._first += len(self._held) - len(tail)
            self._places.append((self._first + len(tail), piece.start))
            while len(self._places) > 1 and self._places[1][0] <= self._first:
                self._places.popleft()
            self._held = tail + piece.data
        offset = self._at - self._first
        text = self._held[offset : offset + size]
        self._at += len(text)
        return text

    def seek(self, at: int) -> int:
        """Go to a byte of the text, or as near to it as is still known."""
        self._at = min(max(at, self._first), self._first + len(self._held))
        return self._at

    def place(self, at: int) -> int:
        """The byte of the file where that begins of which a byte of the text was unpacked."""
        return max(place for begin, place in self._places if begin <= max(at, self._places[0][0]))

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._held = b""
