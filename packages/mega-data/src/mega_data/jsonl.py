"""JSON lines, in chunks that a process can be handed: one object per line, UTF-8, texts under named keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from mega_schema.errors import FormatError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of one file.

    Attributes:
        line: number of the first, from 1.
        size: bytes of all of them.
    """

    path: Path
    line: int
    lines: list[bytes]
    size: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a line: a value that travels between processes, as an exception cannot."""

    where: str
    what: str
    found: str
    wanted: str

    def error(self) -> FormatError:
        hint = "mend or delete the line"
        return FormatError(self.where, self.what, found=self.found, wanted=self.wanted, hint=hint)


def chunks(paths: Iterable[Path], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The lines of the files, in order, in chunks of about `size` bytes; a chunk ends with its file."""
    for path in paths:
        first, lines, held = 1, list[bytes](), 0
        with path.open("rb") as file:
            for line in file:
                lines.append(line)
                held += len(line)
                if held >= size:
                    yield Chunk(path, first, lines, held)
                    first, lines, held = first + len(lines), [], 0
        if lines:
            yield Chunk(path, first, lines, held)


def read(chunk: Chunk, keys: Sequence[str]) -> tuple[list[int], list[tuple[str, ...]]] | Fault:
    """The texts under `keys` of each line that is not blank, with the lines' numbers; or the first fault."""
    numbers, rows = [], []
    for number, line in enumerate(chunk.lines, chunk.line):
        if not line.strip():
            continue
        where = f"{chunk.path}:{number}"
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            return Fault(where, "not JSON", _of(error), "one object a line, in UTF-8")
        if not isinstance(values, dict):
            return Fault(where, "not a JSON object", type(values).__name__, f"an object with {_quoted(keys)}")
        for key in keys:
            if key not in values:
                found = ", ".join(list(values)[:8]) or "no keys"
                return Fault(where, f"no key {key!r}", found, f"{_quoted(keys)} (see --json-keys)")
            if not isinstance(values[key], str):
                return Fault(where, f"the value of {key!r}", type(values[key]).__name__, "a string")
        numbers.append(number)
        rows.append(tuple(values[key] for key in keys))
    return numbers, rows


def texts(paths: Iterable[Path], key: str) -> Iterator[str]:
    """The text under `key` of every line.

    Raises:
        FormatError: a line is not an object with a string there; the message begins with file and line.
    """
    for chunk in chunks(paths):
        found = read(chunk, [key])
        if isinstance(found, Fault):
            raise found.error()
        for row in found[1]:
            yield row[0]


def _of(error: orjson.JSONDecodeError) -> str:
    """The reason and the column; the line it counts is always the first, of one."""
    return f"{error.msg} at column {error.colno}"


def _quoted(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys))
