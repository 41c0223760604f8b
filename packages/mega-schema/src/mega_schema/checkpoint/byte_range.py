"""Read a byte range of a file in blocks, and compute its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

_BLOCK = 1 << 16  # bytes


def read_range(file: BinaryIO, begin: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a range in blocks, up to the end of the file.

    The position in the file may be changed between two blocks.
    """
    position = begin
    while position < begin + size:
        file.seek(position)
        block = file.read(min(_BLOCK, begin + size - position))
        if not block:
            return
        position += len(block)
        yield block


def crc32_of_range(
    file: BinaryIO, begin: int, size: int, update: Callable[[int], object] = lambda count: None
) -> int:
    """Return the CRC-32 of a range, up to the end of the file.

    Args:
        update: called with the bytes read since its last call.
    """
    crc = 0
    for block in read_range(file, begin, size):
        crc = zlib.crc32(block, crc)
        update(len(block))
    return crc
