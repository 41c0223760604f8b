"""Detect the format and the compression of a file by its first bytes.

A compressed file is decompressed whatever its name. An unsupported format (a JSON array, UTF-16, ...) is
an error with the name of the format and a command that converts it.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final

from mega_schema.errors import ConfigError

HEAD_BYTES: Final = 512  # read to detect the format
_ENDINGS: Final = MappingProxyType(
    {**{name: name for name in (".gz", ".zst", ".xz", ".bz2", ".lz4")}, ".gzip": ".gz", ".zstd": ".zst"}
)
_COMPRESSIONS: Final = (
    (b"\x1f\x8b\x08", ".gz"),
    (b"\x28\xb5\x2f\xfd", ".zst"),
    (b"\xfd7zXZ\0", ".xz"),
    (b"\x04\x22\x4d\x18", ".lz4"),
)
_BZIP2_BLOCKS: Final = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")  # block, or end
_FOREIGN_FORMATS: Final = (
    (b"PAR1", "a Parquet file", "end its name in .parquet"),
    (b"ARROW1\0\0", "an Arrow file", "datasets.load_dataset('arrow', ...).to_parquet('a.parquet')"),
    (b"PK\x03\x04", "a zip archive", "unzip it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x it first"),
    (b"%PDF-", "a PDF file", "pdftotext it first"),
    (b"WARC/", "a web archive", "mega-data extract"),
    (b"<mediawiki", "a wiki dump", "mega-data extract"),
    (b"\xff\xfe", "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > FILE.utf8"),
    (b"\xfe\xff", "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > FILE.utf8"),
)
BOM: Final = b"\xef\xbb\xbf"


def name_compression(path: Path) -> str:
    """Return the compression that a file extension implies: .gz, .zst, .xz, .bz2 or .lz4; "" for none."""
    return _ENDINGS.get(path.suffix, "")


def head_compression(head: bytes) -> str:
    """Return the compression of a file that begins with these bytes; "" for none."""
    if head[:3] == b"BZh" and head[4:10] in _BZIP2_BLOCKS:
        return ".bz2"
    return next((name for magic, name in _COMPRESSIONS if head.startswith(magic)), "")


def detect_compression(path: Path) -> str:
    """Return the compression of a file by its name, else by its first bytes."""
    if (by_name := name_compression(path)) or not path.is_file():
        return by_name
    with path.open("rb") as file:
        return head_compression(file.read(HEAD_BYTES))


def check_format(path: Path, file_format: str, head: bytes) -> None:
    """Refuse a file whose first bytes are of an unsupported format, or do not match its name.

    Args:
        file_format: format to read it as: jsonl, csv, text or table.
        head: its first HEAD_BYTES bytes, decompressed.

    Raises:
        ConfigError: the file is of another format; the hint has a command to convert it.
    """
    if file_format == "table":
        return
    for magic, name, hint in _FOREIGN_FORMATS:
        if head.startswith(magic):
            raise ConfigError(path, f"is {name}", wanted=_describe_format(file_format), hint=hint)
    if head[257:262] == b"ustar":
        raise ConfigError(
            path, "is a tar archive", wanted=_describe_format(file_format), hint=f"tar xf {path}"
        )
    if file_format == "jsonl":
        _check_json_lines(path, head)


def _check_json_lines(path: Path, head: bytes) -> None:
    text = head.removeprefix(BOM).lstrip()
    line, _, tail = text.partition(b"\n")
    wanted = _describe_format("jsonl")
    if text[:1] == b"[" and text[1:].lstrip()[:1] == b"{":
        hint = f"jq -c '.[]' {path} > {path.stem}.jsonl"
        raise ConfigError(path, "is one JSON array", wanted=wanted, hint=hint)
    if line.strip() == b"{" and tail.lstrip()[:1] == b'"':
        hint = f"jq -c . {path} > {path.stem}.jsonl"
        raise ConfigError(path, "is JSON over several lines", wanted=wanted, hint=hint)
    if line[:1] == b"<":
        hint = "mega-data extract, or --input-format text"
        raise ConfigError(path, "is XML or HTML", wanted=wanted, hint=hint)


def _describe_format(file_format: str) -> str:
    return {"jsonl": "JSON lines in UTF-8, an object a line", "csv": "CSV in UTF-8"}.get(
        file_format, "text in UTF-8"
    )
