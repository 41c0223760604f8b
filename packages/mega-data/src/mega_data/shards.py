"""Shards: files of JSON lines, plain or compressed, read line by line and written whole."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import orjson

from mega_schema.commit import replacing
from mega_schema.errors import ConfigError, FormatError

ENDINGS = (".gz", ".zst", ".xz", ".bz2")
TYPES = (".jsonl", ".json", ".txt", ".ndjson")


def shards(inputs: Iterable[Path]) -> list[Path]:
    """The files in the order of their names, folders opened: the same whatever the order they are given in.

    Raises:
        ConfigError: two files have one name, and could not both be written; or there is no file.
    """
    found = set[Path]()
    for path in inputs:
        names = path.rglob("*") if path.is_dir() else [path]
        found.update(name for name in names if path.is_file() or (name.is_file() and _typed(name)))
    files = sorted(found, key=lambda path: (output_name(path), path))
    if not files:
        raise ConfigError("--input", "no files there", wanted=" or ".join(TYPES))
    for one, other in zip(files, files[1:], strict=False):
        if output_name(one) == output_name(other):
            raise ConfigError("--input", f"two files of one name: {one} and {other}", hint="rename one")
    return files


def output_name(path: Path) -> str:
    """The name of what is written from a file: without the ending of its compression."""
    return path.stem if path.suffix in ENDINGS else path.name


def _typed(path: Path) -> bool:
    return Path(output_name(path)).suffix in TYPES and not path.name.startswith(".")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed by the ending of its name.

    Raises:
        FormatError: the compression is damaged.
    """
    damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
    if path.suffix == ".zst":
        damage = (*damage, _zstandard(path).ZstdError)
    try:
        with _open(path) as file:
            yield file
    except damage as error:
        raise FormatError(path, "damaged", found=error, hint="copy it again") from None
    except OSError as error:
        if error.filename is None and error.errno is None:  # bz2's way to say the same
            raise FormatError(path, "damaged", found=error, hint="copy it again") from None
        raise


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(path)  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".bz2":
        return bz2.open(path)
    if path.suffix == ".zst":
        return io.BufferedReader(_Frames(path), 1 << 20)
    return path.open("rb", buffering=1 << 20)


class _Frames(io.RawIOBase):
    """The text of a .zst file; the library's own reader takes a file that was cut off for a whole one."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self._frames = _zstandard(path).ZstdDecompressor()
        self._frame: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not len(self._text) and (packed := self._raw.read(1 << 17)):
            self._text = memoryview(self._unpacked(packed))
        if not len(self._text) and self._frame is not None:
            raise EOFError("the last frame ends early")
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _unpacked(self, packed: bytes) -> bytes:
        text = list[bytes]()
        while packed:
            frame = self._frame or self._frames.decompressobj()
            text.append(frame.decompress(packed))
            packed, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return b"".join(text)


def _zstandard(path: Path) -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        hint = 'pip install "mega-data[zst]"'
        raise ConfigError(path, "needs zstandard, which is not installed", hint=hint) from None


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a shard, each with its line break where it has one."""
    with opened(path) as file:
        yield from file


def document(line: bytes, path: Path, number: int, key: str) -> dict[str, Any]:
    """The object on a line, with a text under `key`.

    Raises:
        FormatError: it is something else; the message begins with file and line.
    """
    where, hint = f"{path}:{number}", "mend or delete the line"
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        at = f"{error.msg} at column {error.colno}"
        raise FormatError(
            where, "not JSON", found=at, wanted="one object a line, in UTF-8", hint=hint
        ) from None
    if not isinstance(found, dict):
        raise FormatError(where, "not a JSON object", found=type(found).__name__, hint=hint)
    if not isinstance(found.get(key), str):
        keys = ", ".join(list(found)[:8]) or "no keys"
        raise FormatError(
            where, f"no text under {key!r}", found=keys, wanted="a string there (see --json-key)"
        )
    return found


def batches(path: Path, key: str, characters: int) -> Iterator[list[str]]:
    """The texts of a shard, one per line, in lists of about so many characters. A blank line is empty."""
    texts, size = list[str](), 0
    for number, line in enumerate(lines(path), 1):
        text = document(line, path, number, key)[key] if line.strip() else ""
        texts.append(text)
        size += len(text) + 1
        if size >= characters:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def identity(files: Sequence[Path]) -> list[list[str | int]]:
    """What tells that the inputs of a run are still the same: names, sizes and times of change."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb", buffering=1 << 20) as out:
        yield out
