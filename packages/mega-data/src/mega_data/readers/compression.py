"""Read compressed files, as one stream or in pieces with the offset of each piece in the file.

`open_decompressed` raises at damage. `read_pieces` yields a DamagedRange and continues at the next readable
unit: the next byte of a plain file, block of bz2, member of gz, frame or stream of the others.
"""

from __future__ import annotations

import bz2
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
from typing import IO, Any, cast

from isal import isal_zlib

from mega_data.readers.magic import HEAD_BYTES, detect_compression, head_compression, name_compression
from mega_data.readers.versions import check_version, version_of_stat
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, CorruptFileError
from mega_schema.remote_files import is_remote

SPLITTABLE = ("", ".bz2")  # can be read from any offset
_CHUNK = 1 << 20
_MAX_FRAME_TEXT = 1 << 22  # bytes of text to hold until the checksum of a frame
_READ_BYTES = 1 << 10  # decompressed at a time: the output of a zip bomb must fit in memory
_GZIP_DAMAGE = cast("type[Exception]", isal_zlib.error)  # its stub declares an instance
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_XZ, _LZ4 = b"\xfd7zXZ\0", b"\x04\x22\x4d\x18"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that follows the piece before it without a gap.

    Attributes:
        start: byte of the file; of a compressed file the byte at which its block or frame begins.
        end: byte of the file after those read for the text.
    """

    start: int
    data: bytes
    end: int


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes that cannot be read or parsed.

    Attributes:
        start, end: bytes of the file on disk.
        why: message of the reader.
        reason: category under which it is counted.
    """

    start: int
    end: int
    why: str
    reason: str = "damaged"


def strip_extension(path: Path) -> str:
    """Return the name of a file without the extension of its compression."""
    return path.stem if name_compression(path) else path.name


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open the decompressed bytes of a file.

    Raises:
        ConfigError: the library for it is not installed.
        CorruptFileError: the file is damaged.
    """
    with open_counted(path) as (file, _):
        yield file


@contextmanager
def open_counted(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file as `open_decompressed` does; also yield a function for the bytes read on disk."""
    with path.open("rb", buffering=1 << 20) as raw, decompress(raw, path) as file:
        # a remote file checks its version itself, once it is read to its end
        before = version_of_stat(path.stat() if is_remote(path) else os.fstat(raw.fileno()))
        yield file, raw.tell if raw.seekable() else lambda: 0
        if raw.seekable():
            check_version(path, before)


@contextmanager
def decompress(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Decompress an open file or pipe by the extension of its name, else by its first bytes.

    Raises:
        ConfigError: the library for it is not installed.
        CorruptFileError: the file is damaged.
    """
    compression = name_compression(path) or head_compression(_peek(raw))
    damage_errors: tuple[type[Exception], ...] = (EOFError, _GZIP_DAMAGE, lzma.LZMAError)
    if compression == ".zst":
        damage_errors = (*damage_errors, import_for_file(path, "zstandard", "zst").ZstdError)
    if compression == ".lz4":
        damage_errors = (*damage_errors, RuntimeError)  # of its library
    try:
        with _open_decoder(path, compression, raw) as file:
            yield file
    except damage_errors as error:
        raise _stream_error(path, raw, str(error) or type(error).__name__) from None
    except OSError as error:
        if error.filename is None and error.errno is None:  # damage in bz2
            raise _stream_error(path, raw, str(error) or type(error).__name__) from None
        raise


def _peek(raw: IO[bytes]) -> bytes:
    """Return the first bytes without consuming them."""
    return bytes(raw.peek(HEAD_BYTES)[:HEAD_BYTES]) if isinstance(raw, io.BufferedReader) else b""


def _open_decoder(path: Path, compression: str, raw: IO[bytes]) -> Any:
    if compression == ".gz":
        reader = _FrameReader(raw, lambda: isal_zlib.decompressobj(31), _GZIP_DAMAGE, 1 << 14, padding=b"\0")
    elif compression == ".xz":
        reader = _FrameReader(raw, lzma.LZMADecompressor, lzma.LZMAError, _READ_BYTES, padding=b"\0")
    elif compression == ".bz2":
        reader = _FrameReader(raw, bz2.BZ2Decompressor, OSError, _READ_BYTES)
    elif compression == ".lz4":
        lz4 = import_for_file(path, "lz4.frame", "lz4")
        reader = _FrameReader(raw, lz4.LZ4FrameDecompressor, RuntimeError, 1 << 14)
    elif compression == ".zst":
        zstandard = import_for_file(path, "zstandard", "zst")
        frames = zstandard.ZstdDecompressor()
        reader = _FrameReader(raw, frames.decompressobj, zstandard.ZstdError, 1 << 17)
    else:
        return nullcontext(raw)
    return io.BufferedReader(reader, 1 << 20)


class _FrameReader(io.RawIOBase):
    """The text of a compressed file.

    The libraries' own readers do not detect a truncated .zst, take a damaged stream of a .bz2, .xz or .lz4
    for its end, and lose the text before the end of a truncated .gz.
    """

    def __init__(
        self,
        raw: IO[bytes],
        open_frame: Callable[[], Any],
        damage_error: type[Exception],
        read_bytes: int,
        *,
        padding: bytes = b"",
    ) -> None:
        self._raw = raw
        self._open_frame = open_frame
        self._damage_error = damage_error
        self._read_bytes = read_bytes  # compressed, at a time
        self._padding = padding  # byte that may lie between frames
        self._damage: Exception | None = None  # after the text that is not yet read
        self._frame: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while (
            not len(self._text) and self._damage is None and (compressed := self._raw.read(self._read_bytes))
        ):
            self._text = memoryview(self._decompress(compressed))
        if not len(self._text) and self._damage is not None:
            raise self._damage
        if not len(self._text) and self._frame is not None:
            raise EOFError("the last frame ends early")
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def _decompress(self, compressed: bytes) -> bytes:
        text = list[bytes]()
        while (
            compressed := compressed if self._frame or not self._padding else compressed.lstrip(self._padding)
        ):
            frame = self._frame or self._open_frame()
            try:
                text.append(frame.decompress(compressed))
            except self._damage_error as error:
                self._damage = error
                break
            compressed, self._frame = (frame.unused_data or b"", None) if frame.eof else (b"", frame)
        return b"".join(text)


def import_for_file(path: Path, module: str, extra: str) -> Any:
    """Import a library that a file needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        what, hint = "needs a library that is not installed", install_hint("mega-data", extra)
        raise ConfigError(path, what, wanted=module.partition(".")[0], hint=hint) from None


def _stream_error(path: Path, raw: IO[bytes], why: str) -> CorruptFileError:
    """Build the error of a damaged stream. The decoders do not tell the place: a local file is read again."""
    if is_remote(path) or not raw.seekable() or not path.is_file():
        return damage_error(path, why)
    read_to = 0
    for piece in read_pieces(path):
        if isinstance(piece, DamagedRange):
            # a large frame is read in pieces: those before the damage are not lost
            return damage_error(path, lost_bytes(path, why, max(piece.start, read_to)))
        read_to = piece.end
    return damage_error(path, why)


def lost_bytes(path: Path, why: str, start: int, end: int | None = None) -> str:
    """Describe the bytes of a local file that are not read because of damage.

    Args:
        end: end of the range that is read; None is the end of the file.
    """
    size = path.stat().st_size
    lost = (size if end is None else min(end, size)) - start
    return f"{why}, in the part from byte {start:,} on; about {max(0, lost):,} of {size:,} bytes are lost"


def damage_error(path: Path, why: str) -> CorruptFileError:
    return CorruptFileError(path, "damaged", found=why, hint="copy the file again")


def read_pieces(path: Path, start: int = 0, edge: int | None = None) -> Iterator[TextPiece | DamagedRange]:
    """Read the text of a file from byte `start` on, and the damaged ranges.

    Args:
        start: not 0 only for SPLITTABLE files, and at a member of a .gz or a frame of a .zst file.
        edge: byte of a plain file at which a new piece must begin.

    Raises:
        ConfigError: a library that the compression needs is not installed.
    """
    kind = detect_compression(path)
    if kind == ".bz2":
        from mega_data.readers.bzip2 import read_bzip2

        return read_bzip2(path, start)
    if kind == ".gz":
        return _read_frames(path, GZIP_MAGIC, lambda: zlib.decompressobj(31), zlib.error, start)
    if kind == ".xz":
        return _read_frames(path, _XZ, lzma.LZMADecompressor, lzma.LZMAError)
    if kind == ".zst":
        zstandard = import_for_file(path, "zstandard", "zst")
        frames = zstandard.ZstdDecompressor()
        return _read_frames(path, ZSTD_MAGIC, frames.decompressobj, zstandard.ZstdError, start)
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
            yield TextPiece(position, text, position + len(text))
            position += len(text)


def _read_frames(
    path: Path,
    magic: bytes,
    open_frame: Callable[[], Any],
    damage_error: type[Exception],
    start: int = 0,
) -> Iterator[TextPiece | DamagedRange]:
    """Read a file of frames that each begin with `magic`, from the frame at byte `start` on.

    The checksum of a frame comes after its text. Frames of up to _MAX_FRAME_TEXT bytes of text are yielded
    after the checksum, larger ones while they are read: text before the damage in a large frame may be wrong
    too.
    """
    with path.open("rb") as file:
        frame: Any = None
        pending = list[bytes]()  # text of the frame not yet yielded
        position = frame_start = file.seek(start)
        size = 0  # of the text of the frame
        while compressed := file.read(_READ_BYTES):
            while compressed:
                if frame is None:
                    # gz and xz files may be padded
                    stripped = compressed.lstrip(b"\0") if magic in (GZIP_MAGIC, _XZ) else compressed
                    position = position + len(compressed) - len(stripped)
                    compressed = stripped
                    if not compressed:
                        break
                    frame = open_frame()
                    frame_start = position
                    pending = []
                    size = 0
                try:
                    text = frame.decompress(compressed)
                except damage_error as error:
                    resume_at = find_magic(file, magic, max(position, frame_start + 1))
                    yield DamagedRange(frame_start if pending else position, resume_at, str(error))
                    position = resume_at
                    compressed = b""
                    frame = None
                    file.seek(resume_at)
                    break
                unused = (frame.unused_data or b"") if frame.eof else b""
                pending.append(text)
                size += len(text)
                position = position + len(compressed) - len(unused)
                if frame.eof or size > _MAX_FRAME_TEXT:
                    if size:
                        yield TextPiece(frame_start, b"".join(pending), position)
                    pending = []
                compressed = unused
                frame = None if frame.eof else frame
        if frame is not None:
            yield DamagedRange(frame_start, position, "the file ends within the frame that begins here")


def find_magic(file: IO[bytes], magic: bytes, position: int) -> int:
    """Find the next possible start of a frame, from a byte on; the end of the file if there is none."""
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
    """Pieces as a file object, up to the next gap; set `gap` to None to read on after it.

    Attributes:
        gap: the damage at which reading has stopped; None at the end of the file.
    """

    def __init__(self, parts: Iterator[TextPiece | DamagedRange]) -> None:
        self.gap: DamagedRange | None = None
        self._places = deque[tuple[int, int]]([(0, 0)])  # start of each piece in the text and in the file
        self._parts = parts
        self._buffer = b""
        self._first = self._position = 0  # offsets in the text: start of `_buffer`, and of the next read

    def read(self, size: int) -> bytes:
        while self._position >= self._first + len(self._buffer):
            piece = None if self.gap else next(self._parts, None)
            if isinstance(piece, DamagedRange):
                self.gap = piece
            if not isinstance(piece, TextPiece):
                return b""
            tail = self._buffer[-_CHUNK:]
            self._first += len(self._buffer) - len(tail)
            self._places.append((self._first + len(tail), piece.start))
            while len(self._places) > 1 and self._places[1][0] <= self._first:
                self._places.popleft()
            self._buffer = tail + piece.data
        offset = self._position - self._first
        text = self._buffer[offset : offset + size]
        self._position += len(text)
        return text

    def seek(self, position: int) -> int:
        """Seek to a byte of the text, or to the nearest one still in memory."""
        self._position = min(max(position, self._first), self._first + len(self._buffer))
        return self._position

    def file_offset(self, position: int) -> int:
        """Return the offset in the file of the piece that contains a byte of the text."""
        return max(place for begin, place in self._places if begin <= max(position, self._places[0][0]))

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._buffer = b""
