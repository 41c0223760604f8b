"""Open a file of text that may be compressed: .gz or .zst."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from mega_eval.input_paths import build_path_error
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError

SUFFIXES = (".gz", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson")
_HEAD = 4096  # bytes that tell text from a binary file


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
    return decode_utf8(content, path, encoding)


def decode_utf8(content: bytes, path: Path, encoding: str = "utf-8", *, first_line: int = 1) -> str:
    """Decode the content of a file, or a line of it.

    Args:
        encoding: "utf-8-sig" drops a byte order mark.
        first_line: number of the content's first line in the file.

    Raises:
        FormatError: it is not UTF-8. The hint says what it may be.
    """
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line = first_line + before.count(b"\n")
        column = error.start - before.rfind(b"\n")
        raise FormatError(
            f"{path}:{line}",
            "not UTF-8",
            found=f"byte {error.object[error.start]:#04x} at column {column}",
            wanted="text in UTF-8",
            hint=_describe_binary(path),
        ) from None


def _describe_binary(path: Path) -> str:
    """Say what a file is that is not UTF-8, by its first bytes."""
    with open_file(path) as file:
        head = file.read(_HEAD)
    for magic, suffix in ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst")):
        if head.startswith(magic):
            return f"it is compressed: mv {path} {path}{suffix}"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"iconv -f utf-16 -t utf-8 {path}"
    if b"\0" in head:
        return "it is a binary file, not text"
    return f"iconv -f latin1 -t utf-8 {path}, or the encoding that it has"


def check_file(path: Path) -> None:
    """Check that the path is a file.

    Raises:
        FormatError: there is none, or it is a folder.
    """
    if not path.is_file():
        raise build_path_error(path, "file")


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
