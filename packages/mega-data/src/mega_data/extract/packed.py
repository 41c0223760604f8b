"""A file's text piece by piece, each with its place; after damage, from where it can be read again.

plain  anywhere      bz2  the next block      gz  the next member      others  the next frame or stream
"""

from __future__ import annotations

import lzma
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mega_data.extract.bzip2 import blocks
from mega_data.extract.types import Gap, Text
from mega_data.readers.magic import compression
from mega_data.readers.packed import library

CUTTABLE = ("", ".bz2")  # what can be read from any place on
_CHUNK = 1 << 20
_HELD = 1 << 22  # bytes of text
_PACKED = 1 << 10  # bytes unpacked at a time: what a bomb makes of them has to fit into memory
_GZIP, _XZ, _ZSTD, _LZ4 = b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"


def packing(path: Path) -> str:
    """The ending of a file's compression, "" without one."""
    return compression(path)


def pieces(path: Path, start: int = 0, edge: int | None = None) -> Iterator[Text | Gap]:
    """The text of a file that begins at byte `start` or later, and the gaps.

    Args:
        start: not 0 only for those of CUTTABLE.
        edge: a byte of a plain file at which a piece is to begin.

    Raises:
        ConfigError: a library that the compression needs is not installed.
    """
    kind = packing(path)
    if kind == ".bz2":
        return blocks(path, start)
    if kind == ".gz":
        return _frames(path, _GZIP, lambda: zlib.decompressobj(31), zlib.error)
    if kind == ".xz":
        return _frames(path, _XZ, lzma.LZMADecompressor, lzma.LZMAError)
    if kind == ".zst":
        zstandard = library(path, "zstandard", "zst")
        return _frames(path, _ZSTD, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    if kind == ".lz4":
        lz4 = library(path, "lz4.frame", "lz4")
        return _frames(path, _LZ4, lz4.LZ4FrameDecompressor, RuntimeError)
    return _plain(path, start, edge)


def _plain(path: Path, start: int, edge: int | None) -> Iterator[Text | Gap]:
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while text := file.read(min(_CHUNK, edge - at) if edge is not None and at < edge else _CHUNK):
            yield Text(at, text)
            at += len(text)


def _frames(
    path: Path, magic: bytes, begin: Callable[[], Any], damage: type[Exception]
) -> Iterator[Text | Gap]:
    """The text of a file of frames that each begin with `magic`.

    The checksum of a frame comes after its text. Frames of up to _HELD bytes of text are given when it was
    right, larger ones as they are read: what a gap in one comes after may be damaged as well.
    """
    with path.open("rb") as file:
        frame: Any = None
        held = list[bytes]()  # text of the frame not yet given
        at = first = size = 0  # of what is unpacked now, and of its frame; of what is held
        while packed := file.read(_PACKED):
            while packed:
                if frame is None:
                    rest = packed.lstrip(b"\0") if magic in (_GZIP, _XZ) else packed  # those may be padded
                    at, packed = at + len(packed) - len(rest), rest
                    if not packed:
                        break
                    frame, first, held, size = begin(), at, [], 0
                try:
                    text = frame.decompress(packed)
                except damage as error:
                    after = _next(file, magic, max(at, first + 1))
                    yield Gap(first if held else at, after, str(error))
                    at, packed, frame = after, b"", None
                    file.seek(after)
                    break
                left = (frame.unused_data or b"") if frame.eof else b""
                held.append(text)
                size += len(text)
                if frame.eof or size > _HELD:
                    if size:
                        yield Text(first, b"".join(held))
                    held = []
                at, packed = at + len(packed) - len(left), left
                frame = None if frame.eof else frame
        if frame is not None:
            yield Gap(first, at, "the file ends within what began here")


def _next(file: IO[bytes], magic: bytes, at: int) -> int:
    """Where a frame may begin, from a byte on; the end of the file where none does."""
    file.seek(at)
    held = b""
    while more := file.read(_CHUNK):
        held += more
        found = held.find(magic)
        if found >= 0:
            return at + found
        at += max(0, len(held) - len(magic) + 1)
        held = held[-len(magic) + 1 :]
    return at + len(held)


class Joined:
    """Pieces as a file to read from, up to the next gap; it goes on behind the gap once `gap` is None again.

    Attributes:
        gap: where reading has stopped, None at the end of the file.
    """

    def __init__(self, parts: Iterator[Text | Gap]) -> None:
        self.gap: Gap | None = None
        self._places = deque[tuple[int, int]]([(0, 0)])  # where pieces begin: of the text, of the file
        self._parts, self._held = parts, b""
        self._first = self._at = 0  # of the text: where `_held` begins, and what is read next

    def read(self, size: int) -> bytes:
        while self._at >= self._first + len(self._held):
            piece = None if self.gap else next(self._parts, None)
            if isinstance(piece, Gap):
                self.gap = piece
            if not isinstance(piece, Text):
                return b""
            kept = self._held[-_CHUNK:]
            self._first += len(self._held) - len(kept)
            self._places.append((self._first + len(kept), piece.at))
            while len(self._places) > 1 and self._places[1][0] <= self._first:
                self._places.popleft()
            self._held = kept + piece.data
        begin = self._at - self._first
        text = self._held[begin : begin + size]
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
