"""WARC files, as crawlers write them: pages of HTML, or the plain text that a WET file has for each.

The file may be plain, .gz, .zst or .lz4, which FastWARC sees by its first bytes, or .bz2 and .xz.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

from mega_data.extract.html import html_text
from mega_data.extract.pages import LONGEST_PAGE, LeftOut, Page
from mega_data.readers.packed import opened
from mega_schema.errors import FormatError

HTML = ("text/html", "application/xhtml+xml")
_GZIP = b"\x1f\x8b\x08"
_BLANK = b"\r\n\r\n"
_PLAIN = _BLANK + b"WARC/1."
_BLOCK = 1 << 20


def warc_pages(
    path: Path, *, html: bool = True, plain: bool = True, whole: bool = False
) -> Iterator[Page | LeftOut]:
    """The pages of a file in its order. After a damaged place it goes on at the next record.

    Args:
        html: take responses that are HTML.
        plain: take conversions to plain text, which are what a WET file has.
        whole: as in `html_text`.

    Raises:
        FormatError: there is no record in it.
    """
    seen, told, start = False, False, 0
    with opened(path) if path.suffix in (".bz2", ".xz") else path.open("rb") as file:
        mark = _mark(file)
        while start >= 0:
            file.seek(start)
            at, ended = start, "no record"
            try:
                for record in ArchiveIterator(file, parse_http=html, auto_decode="all"):
                    at, ended, seen, told = start + record.stream_pos, "", True, False
                    yield _page(record, html, plain, whole)
            except (OSError, EOFError, ValueError) as error:
                ended = str(error)
            if not ended:
                return
            if not told and seen:
                yield LeftOut("damaged", f"{path}: after byte {at:,}: {ended}")
                told = True
            start = _next(file, mark, at + 1)
    if not seen:
        raise FormatError(path, "not a web archive", wanted="records that begin with WARC/1.")


def _mark(file: IO[bytes]) -> bytes:
    """What every record of the file begins with, none where that does not show in the file's bytes."""
    head = file.read(5)
    if head.startswith(_GZIP):
        return _GZIP
    return _PLAIN if head.startswith(b"WARC/") else b""


def _next(file: IO[bytes], mark: bytes, at: int) -> int:
    """Where a record may begin after `at`; -1 where none does."""
    if not mark:
        return -1
    file.seek(at)
    held = b""
    while more := file.read(_BLOCK):
        held += more
        found = held.find(mark)
        if found >= 0:
            return at + found + (len(_BLANK) if mark == _PLAIN else 0)
        at += max(0, len(held) - len(mark) + 1)
        held = held[-len(mark) + 1 :]
    return -1


def _page(record: WarcRecord, html: bool, plain: bool, whole: bool) -> Page | LeftOut:
    kind = record.record_type
    if kind == WarcRecordType.response and html:
        status = _status(record)
        if status != 200:
            return LeftOut(f"status {status}")
        if (record.http_content_type or "").lower() not in HTML:
            return LeftOut("not HTML")
        data = _body(record)
        if isinstance(data, LeftOut):
            return data
        title, text = html_text(data, record.http_charset or "", whole=whole)
    elif kind == WarcRecordType.conversion and plain:
        data = _body(record)
        if isinstance(data, LeftOut):
            return data
        title, text = "", data.decode("utf-8", "replace").strip()
    else:
        return LeftOut(f"{kind} record")
    headers = record.headers
    url = (headers.get("WARC-Target-URI") or "").strip("<>")
    return Page(record.record_id or "", url, title, text) if text else LeftOut("no text")


def _status(record: WarcRecord) -> Any:
    return record.http_headers.status_code if record.http_headers else None


def _body(record: WarcRecord) -> bytes | LeftOut:
    data: bytes = record.reader.read(LONGEST_PAGE + 1)
    if len(data) > LONGEST_PAGE:
        return LeftOut("too long")
    headers: Any = record.http_headers or {}
    coded = headers.get("Content-Encoding") or headers.get("Transfer-Encoding")
    return LeftOut("cut off") if len(data) < record.content_length and not coded else data


def html_page(path: Path, *, whole: bool = False) -> Iterator[Page | LeftOut]:
    """A file that is one page of HTML; its path is its id and its address."""
    with opened(path) as file:
        data = file.read(LONGEST_PAGE + 1)
    if len(data) > LONGEST_PAGE:
        yield LeftOut("too long")
        return
    title, text = html_text(data, whole=whole)
    yield Page(path.as_posix(), path.as_posix(), title, text) if text else LeftOut("no text")
