"""Open a file of text that may be compressed: .gz or .zst."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError

SUFFIXES = (".gz", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson")


def base_suffix(path: Path) -> str:
    """Return the suffix under that of the compression: .jsonl of a.jsonl.gz."""
    return (path.with_suffix("") if path.suffix in SUFFIXES else path).suffix


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; the suffix names its compression.

    Raises:
        FormatError: the file is missing, damaged or truncated.
        ConfigError: the library for .zst is not installed.
    """
    check_file(path)
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                yield cast(BinaryIO, file)
        elif path.suffix == ".zst":
            with path.open("rb") as raw:
                yield io.BytesIO(_decompress_zstd(path, raw.read()))
        else:
            with path.open("rb") as raw:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(path, "damaged or truncated", found=str(error)) from None


def read_utf8(path: Path, encoding: str = "utf-8") -> str:
    """Read a UTF-8 file, which may be compressed; its line ends are not converted.

    Args:
        encoding: "utf-8-sig" drops a byte order mark.

    Raises:
        FormatError: the file is missing, damaged or not UTF-8.
    """
    with open_file(path) as file:
        content = file.read()
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise FormatError(
            path, "not UTF-8", found=f"byte {error.object[error.start]:#04x} at {error.start}"
        ) from None


def check_file(path: Path) -> None:
    """Check that the path is a file.

    Raises:
        FormatError: there is none, or it is a folder.
    """
    if not path.is_file():
        raise FormatError(path, "is a folder" if path.is_dir() else "no such file")


def _decompress_zstd(path: Path, content: bytes) -> bytes:
    """Decompress all frames; the library's reader ends silently in a truncated one."""
    try:
        import zstandard
    except ImportError:
        hint = install_hint("mega-eval", "zst")
        raise ConfigError(path, "zstandard is not installed", hint=hint) from None
    parts = []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            parts.append(frame.decompress(content))
        except zstandard.ZstdError as error:
            raise FormatError(path, "damaged", found=str(error)) from None
        if not frame.eof:
            raise FormatError(path, "truncated", found=f"{sum(map(len, parts))} bytes of text")
        content = frame.unused_data
    return b"".join(parts)
