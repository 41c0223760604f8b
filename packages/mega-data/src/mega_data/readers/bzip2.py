"""Read bz2 block by block.

A block begins with a 48-bit magic number at any bit offset and can be decompressed independently. So a file
can be read from any offset, whether it has one stream or, like Wikipedia's multistream dumps, many, and
reading continues at the next whole block after damage. The mark may also occur in the data of a block: a mark
counts only if the block decompresses with a valid checksum.
"""

from __future__ import annotations

import re
from bz2 import BZ2Decompressor
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO

from mega_data.readers.compression import DamagedRange, TextPiece

_BLOCK_MARK = 0x314159265359  # pi
_STREAM_END_MARK = 0x177245385090  # the square root of pi
_BITS = 48
_MAX_BLOCK_BITS = 10_000_000  # a block has 900,000 bytes of text, and at worst grows a little
_MAX_ENDS_TRIED = 16  # per block; the end of a whole block is among the first few
_CHUNK = 1 << 20


def _patterns() -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield the five middle bytes of each mark at each bit offset; all of their bits are known."""
    for mark in (_BLOCK_MARK, _STREAM_END_MARK):
        for shift in range(8):
            yield (mark << (8 - shift)).to_bytes(7, "big")[1:6], (mark, shift)


_MIDDLES = MappingProxyType(dict(_patterns()))
_ANY_MARK = re.compile(b"|".join(map(re.escape, _MIDDLES)))


def read_bzip2(path: Path, start: int = 0) -> Iterator[TextPiece | DamagedRange]:
    """Read the text of every whole block that begins at byte `start` or later, and the damaged ranges.

    Damage before the first block is reported only if `start` is 0; otherwise the reader of the previous part
    reports it.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        read_to = 0 if start == 0 else -1  # bits up to here are reported; -1: none yet
        block_start = _next_block(file, 8 * start)
        while block_start >= 0:
            block_end, text = _decompress_block(file, block_start)
            if block_end >= 0:
                if (
                    read_to >= 0
                    and (gap_start := _skip_stream_marks(file, read_to, block_start)) < block_start
                ):
                    yield DamagedRange(gap_start // 8, block_start // 8, "no whole block of bz2")
                yield TextPiece(block_start // 8, text, block_end // 8)
                read_to = block_end
            block_start = _next_block(file, block_end if block_end >= 0 else block_start + 1)
        if read_to >= 0 and (gap_start := _skip_stream_marks(file, read_to, 8 * size)) != 8 * size:
            yield DamagedRange(
                min(gap_start // 8, size), size, "no whole block of bz2, or no end of its stream"
            )


def _next_block(file: IO[bytes], bit: int) -> int:
    """Find the next block mark from a bit on; -1 for none."""
    return next((place for place, mark in _find_marks(file, bit) if mark == _BLOCK_MARK), -1)


def _find_marks(file: IO[bytes], bit: int) -> Iterator[tuple[int, int]]:
    """Yield the bit offsets of marks from `bit` on, and the marks."""
    base = bit // 8
    buffer = b""
    while True:
        file.seek(base + len(buffer))
        chunk = file.read(_CHUNK)
        buffer += chunk or b"\0"
        for match in _ANY_MARK.finditer(buffer, 1):
            mark, shift = _MIDDLES[match[0]]
            first = match.start() - 1
            around = buffer[match.start() - 1 : match.end() + 1]
            bit_offset = 8 * (base + first) + shift
            if len(around) == 7 and bit_offset >= bit and _bits_to_int(around, shift, _BITS) == mark:
                yield bit_offset, mark
        if not chunk:
            return
        base, bit = base + max(0, len(buffer) - 6), max(bit, 8 * (base + max(0, len(buffer) - 6)))
        buffer = buffer[-6:]


def _bits_to_int(data: bytes, first: int, bits: int) -> int:
    """Convert bits of data to a number."""
    return int.from_bytes(data, "big") >> (8 * len(data) - first - bits) & ((1 << bits) - 1)


def _read_bits(file: IO[bytes], begin: int, end: int) -> int:
    """Read the bits `begin` to `end` of the file as a number; bits after its end are 0."""
    file.seek(begin // 8)
    size = (end + 7) // 8 - begin // 8
    return _bits_to_int(file.read(size).ljust(size, b"\0"), begin % 8, end - begin)


def _decompress_block(file: IO[bytes], begin: int) -> tuple[int, bytes]:
    """Decompress the block at a bit; return its end and text, or -1 if it is damaged or no block."""
    for end, _ in islice(_find_marks(file, begin + _BITS), _MAX_ENDS_TRIED):
        bits = end - begin
        if bits > _MAX_BLOCK_BITS:
            break
        value = _read_bits(file, begin, end)
        checksum = value >> max(0, bits - 80) & 0xFFFFFFFF
        stream_bits = (((value << _BITS) | _STREAM_END_MARK) << 32) | checksum
        pad = -(bits + 80) % 8
        compressed = (stream_bits << pad).to_bytes((bits + 80 + pad) // 8, "big")
        stream = BZ2Decompressor()
        try:
            text = stream.decompress(b"BZh9" + compressed)
        except OSError:
            continue
        if stream.eof:
            return end, text
    return -1, b""


def _skip_stream_marks(file: IO[bytes], position: int, limit: int) -> int:
    """Skip the stream ends and headers between blocks; return the bit after the valid ones."""
    while position < limit:
        mark = _read_bits(file, position, position + 32 + _BITS)
        if (
            position % 8 == 0
            and mark >> 56 == 0x425A68
            and mark & ((1 << _BITS) - 1) in (_BLOCK_MARK, _STREAM_END_MARK)
        ):
            position += 32  # "BZh", and a digit
        elif mark >> 32 == _STREAM_END_MARK:
            position = (position + _BITS + 32 + 7) // 8 * 8
        else:
            break
    return position
