"""Byte ranges of files in which tensors are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from mega_schema.checkpoint.byte_range import read_range

DAMAGED = "the file was cut off or written to; copy it again"


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
        crc: CRC-32 of the bytes; 0 if torch wrote none.
    """

    key: str
    crc: int = 0


def read_blocks(file: BinaryIO, span: Span) -> Iterator[bytes]:
    """Yield the bytes of a span in blocks, up to the end of the file."""
    return read_range(file, span.begin, span.bytes)
