"""A file as blocks, from any position that a block ended at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mega_data.readers.blocks import Block, Lines, PlainText
from mega_data.readers.inputs import NAMED, Input
from mega_data.readers.packed import counted, unpacked
from mega_schema.errors import FormatError

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
        from mega_data.readers.arrow import batches

        yield from batches(given.path, start, keys, size)
    elif given.form == NAMED:
        from mega_data.readers.arrow import named_batches

        yield from named_batches(given.named, start, keys, size)
    elif given.form == "jsonl" and not given.stream and not given.packing:
        yield from _places(given.path, start, size)
    else:
        whole = given.form == "text" and unit == "file"
        paragraphs = given.form == "text" and unit == "paragraph"
        endings = (b"\n\n", b"\n\r\n") if paragraphs else (b"\n",)
        with _opened(given) as (file, consumed):
            _skip(file, start)
            before = 0
            for end, held in _pieces(
                file, start, LONGEST_TEXT if whole else size, endings, given.path, whole
            ):
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
    file: IO[bytes], at: int, size: int, endings: tuple[bytes, ...], path: Path, whole: bool
) -> Iterator[tuple[int, bytes]]:
    """Bytes of about `size` that stop after one of the endings, each with the position of its end."""
    held = b""
    while more := file.read(size):
        held += more
        if whole:
            if len(held) >= LONGEST_TEXT:
                raise _too_long(path)
            continue
        if cut := max(held.rfind(ending) + len(ending) if ending in held else 0 for ending in endings):
            at += cut
            yield at, held[:cut]
            held = held[cut:]
        elif len(held) >= LONGEST_TEXT:
            raise _too_long(path)
    if held:
        yield at + len(held), held


def _skip(file: IO[bytes], size: int) -> None:
    while size > 0 and (passed := len(file.read(min(size, BLOCK_BYTES)))):
        size -= passed


@contextmanager
def _opened(given: Input) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The bytes of an input, decompressed, and how many bytes of the file they took so far."""
    if given.stdin:
        with unpacked(sys.stdin.buffer, given.path) as file:
            yield file, lambda: 0
        return
    with counted(given.path) as opened:
        yield opened


def _too_long(path: Path) -> FormatError:
    what = f"a line or text of more than {LONGEST_TEXT >> 20} MiB"
    return FormatError(path, what, hint="split it; plain text also with --text-unit paragraph or line")
