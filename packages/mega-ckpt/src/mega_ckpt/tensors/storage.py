"""Byte ranges of files: where the numbers of tensors are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

DAMAGED = "the file was cut off or written to; copy it again"
_BLOCK = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range of a file."""

    begin: int
    bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.bytes


@dataclass(frozen=True, slots=True)
class Storage(Span):
    """The byte range of a torch storage.

    Attributes:
        crc: of the bytes; 0 where torch made none.
    """

    key: str
    crc: int = 0


def read_blocks(file: BinaryIO, span: Span) -> Iterator[bytes]:
    """Yield the bytes of a span in blocks, up to the end of the file."""
    position = span.begin
    while position < span.end:
        file.seek(position)
        block = file.read(min(_BLOCK, span.end - position))
        if not block:
            return
        position += len(block)
        yield block
