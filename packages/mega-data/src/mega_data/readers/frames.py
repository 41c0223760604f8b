"""Find members of a .gz file and frames of a .zst file that can be decompressed independently.

The header of a zstd block holds its size, so the frames of a file are found without decompressing them. A
gzip member has no size, and the bytes that begin one may also occur in the data of another: a member counts
only if it can be decompressed, together with those after it, for _CHECKED_BYTES or up to the end of the file.
A gzip file that is stored in the data of a member cannot pass: stored data is interrupted every 65,535 bytes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mega_data.readers.compression import GZIP_MAGIC, ZSTD_MAGIC, find_magic

_CHECKED_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MAX_TEXT = 1 << 20  # decompressed at a time
_SKIPPABLE_MAGIC = bytes.fromhex("2a4d18")  # after a byte of 50 to 5f
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)  # by the two highest bits of the frame header descriptor
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)  # by its two lowest bits
_RLE, _RESERVED = 1, 3  # block types


def range_starts(path: Path, compression: str, size: int) -> list[int]:
    """Return starts of members or frames that divide a local file into ranges of at least `size` bytes.

    Args:
        compression: .gz or .zst.

    Returns:
        Bytes in the file, the first of them 0.
    """
    with path.open("rb", buffering=0) as file:
        return [*(_gzip_starts if compression == ".gz" else _zstd_starts)(file, size)]


def _gzip_starts(file: IO[bytes], size: int) -> Iterator[int]:
    yield 0
    file_bytes = file.seek(0, 2)
    position = size
    while position < file_bytes and (position := find_magic(file, GZIP_MAGIC, position)) < file_bytes:
        if _begins_members(file, position):
            yield position
            position += size
        else:
            position += 1


def _begins_members(file: IO[bytes], position: int) -> bool:
    """Return whether members follow each other from a byte on, see the docstring of the module."""
    file.seek(position)
    member = zlib.decompressobj(31)
    checked = 0
    try:
        while checked < _CHECKED_BYTES and (data := file.read(_READ_BYTES)):
            checked += len(data)
            while data:
                if member.eof:
                    if not (data := data.lstrip(b"\0")):  # padding
                        break
                    member = zlib.decompressobj(31)
                member.decompress(data, _MAX_TEXT)
                data = member.unused_data if member.eof else member.unconsumed_tail
    except zlib.error:
        return False
    return member.eof or checked >= _CHECKED_BYTES


def _zstd_starts(file: IO[bytes], size: int) -> Iterator[int]:
    descriptor = file.fileno()
    file_bytes = file.seek(0, 2)
    start = position = 0
    while position < file_bytes:
        if position == 0 or position >= start + size:
            start = position
            yield position
        if (position := _zstd_frame_end(descriptor, position)) < 0:
            return  # damage: the reader reports it


def _zstd_frame_end(descriptor: int, position: int) -> int:
    """Return the byte after the frame that begins at a byte; -1 if none begins there, or it is truncated."""
    header = os.pread(descriptor, 8, position)
    if len(header) == 8 and header[0] >> 4 == 5 and header[1:4] == _SKIPPABLE_MAGIC:
        return position + 8 + int.from_bytes(header[4:], "little")
    if len(header) < 5 or header[:4] != ZSTD_MAGIC:
        return -1
    flags = header[4]
    is_single_segment = bool(flags & 32)
    content_size = _CONTENT_SIZE_BYTES[flags >> 6] or int(is_single_segment)
    position += 5 + (not is_single_segment) + _DICTIONARY_ID_BYTES[flags & 3] + content_size
    is_last = 0
    while not is_last:
        block = int.from_bytes(field := os.pread(descriptor, 3, position), "little")
        is_last, kind = block & 1, block >> 1 & 3
        if len(field) < 3 or kind == _RESERVED:
            return -1
        position += 3 + (1 if kind == _RLE else block >> 3)
    return position + (4 if flags & 4 else 0)  # a checksum
