"""Choose the reader of a file by format name or by its first bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mega_data.extract.types import Page, SkippedPage
from mega_data.readers.compression import SPLITTABLE, DamagedRange, TextPiece, read_pieces, strip_extension
from mega_data.readers.file_tree import FileResolver, is_pipe
from mega_data.readers.magic import detect_compression
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError

FORMATS = ("wiki-dump", "warc", "wet", "html")
_EXTENSIONS = (".xml", ".warc", ".wet", ".html", ".htm", ".xhtml")
_HEAD_BYTES = 4096  # read to detect the format
_HINT = "--from " + " | ".join(FORMATS)
RANGE_BYTES = 32_000_000  # of a file per task


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file that are one task: all of them, or a part of a dump.

    Attributes:
        end: end offset; None is the end of the file.
    """

    path: Path
    start: int = 0
    end: int | None = None


def find_inputs(words: Iterable[str | Path]) -> list[Path]:
    """Return the files that the words name, sorted by path; folders are expanded.

    Raises:
        ConfigError: a word names no file, or a pipe; see `readers.file_tree`.
    """
    files = FileResolver(
        _has_known_extension, f"files or folders with {', '.join(_EXTENSIONS[:-1])} or {_EXTENSIONS[-1]}"
    )
    paths = [path for word in words for path in files.resolve(str(word))]
    files.log_repeats()
    for path in filter(is_pipe, paths):
        what, hint = "a pipe is read once, and this command reads twice", "write it to a file first"
        raise ConfigError("--input", what, found=path, hint=hint)
    return sorted(paths)


def _has_known_extension(path: Path) -> bool:
    ending = Path(strip_extension(path)).suffix.partition("-")[0]  # parts of a dump are named .xml-p1p41242
    return ending in _EXTENSIONS


def detect_format(path: Path) -> str:
    """Return the format of a file, one of FORMATS.

    Raises:
        FormatError: the first bytes are of no known format.
    """
    name = [ending.partition("-")[0] for ending in path.suffixes]  # parts of a dump: .xml-p1p41242
    if ".warc" in name:
        return "wet" if ".wet" in name else "warc"
    piece = next(read_pieces(path), None)
    head = piece.data[:_HEAD_BYTES] if isinstance(piece, TextPiece) else b""
    if head.startswith(b"WARC/"):
        return "wet" if ".wet" in name else "warc"
    if isinstance(piece, DamagedRange) and ".xml" in name:
        return "wiki-dump"  # the beginning is damaged; the pages may be intact
    text = head.decode("utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace").casefold()
    if "<mediawiki" in text:
        return "wiki-dump"
    if "<html" in text or "<!doctype html" in text or ".html" in name or ".htm" in name:
        return "html"
    raise FormatError(path, "unknown format", wanted=" or ".join(FORMATS), hint=_HINT)


def split_inputs(
    inputs: Iterable[Path], file_format: str = "auto", size: int = RANGE_BYTES
) -> tuple[FileRange, ...]:
    """Split the files into tasks: dumps of more than `size` bytes become several.

    Plain and bz2 dumps can be read from any offset. Other files stay whole.

    Raises:
        FormatError: a large file is of no known format.
    """
    ranges = list[FileRange]()
    for path in inputs:
        file_bytes = path.stat().st_size
        count = -(-file_bytes // size)
        if count > 1 and not _is_splittable(path, file_format):
            count = 1
        edges = [file_bytes * number // count for number in range(1, count)]
        ranges += [FileRange(path, *ends) for ends in zip([0, *edges], [*edges, None], strict=True)]
    return tuple(ranges)


def _is_splittable(path: Path, file_format: str) -> bool:
    if (
        detect_compression(path) not in SPLITTABLE
        or (detect_format(path) if file_format == "auto" else file_format) != "wiki-dump"
    ):
        return False
    from mega_data.extract.mediawiki import is_splittable

    return is_splittable(path)


def read_pages(
    part: FileRange, file_format: str, *, full_page: bool = False, extractor: str = "resiliparse"
) -> Iterator[Page | SkippedPage | DamagedRange]:
    """Read the pages of a file, or those that begin in a byte range of it.

    Args:
        file_format: one of FORMATS, or `auto`.
        full_page: keep navigation and footers of HTML.
        extractor: of HTML, resiliparse or trafilatura.

    Raises:
        ConfigError: a library that the format needs is not installed.
        FormatError: the file is not of the format.
    """
    path = part.path
    file_format = detect_format(path) if file_format == "auto" else file_format
    if file_format == "wiki-dump":
        from mega_data.extract.mediawiki import read_dump

        return read_dump(path, part.start, part.end)
    try:
        from mega_data.extract.warc import read_html, read_warc
    except ImportError as error:
        what, hint = "needs a library that is not installed", install_hint("mega-data", "extract")
        raise ConfigError(path, what, wanted=error.name or "resiliparse", hint=hint) from None
    if file_format == "html":
        return read_html(path, full_page=full_page, extractor=extractor)
    is_warc = file_format == "warc"
    return read_warc(path, html=is_warc, plain=file_format == "wet", full_page=full_page, extractor=extractor)
