"""WARC files, as crawlers write them: pages of HTML, or the plain text that a WET file has for each.

FastWARC reads the records out of text that is unpacked here, so that a gap in it has a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

from mega_data.extract.html import html_text
from mega_data.extract.packed import Joined, packing, pieces
from mega_data.extract.types import LONGEST_PAGE, Gap, LeftOut, Page
from mega_schema.errors import FormatError

HTML = ("text/html", "application/xhtml+xml")
_BLANK = b"\r\n\r\n"
_WARC = b"WARC/1."
_BLOCK = 1 << 20


def warc_pages(
    path: Path, *, html: bool = True, plain: bool = True, whole: bool = False
) -> Iterator[Page | LeftOut | Gap]:
    """The pages of a file in its order. After a damaged place it goes on at the next record.

    Args:
        html: take responses that are HTML.
        plain: take conversions to plain text, which are what a WET file has.
        whole: as in `html_text`.

    Raises:
        FormatError: there is no record in it.
    """
    seen, start, length, size = False, 0, 0, path.stat().st_size
    lost: tuple[int, str] | None = None  # where, and why, until a record is found
    joined = Joined(pieces(path)) if packing(path) else None
    with closing(joined) if joined else path.open("rb") as source:
        file = cast("IO[bytes]", source)
        while start >= 0:
            file.seek(start)
            at, ended = start, "no record"
            try:
                for record in ArchiveIterator(file, parse_http=html, auto_decode="all"):
                    at, ended, seen = start + record.stream_pos, "", True
                    place = joined.place(at) if joined else at
                    if lost is not None:
                        yield Gap(lost[0], place, lost[1])
                    lost, length = None, int(record.headers.get("Content-Length") or 0)
                    yield _page(record, html, plain, whole, place)
            except (OSError, EOFError, ValueError) as error:
                ended = str(error)
            if joined and joined.gap:
                yield joined.gap
                joined.gap, at, ended = None, joined.tell(), ""
            elif not ended:
                break
            elif lost is None and seen:
                harm = _behind(file, at, length)
                lost = min(size, joined.place(harm) if joined else harm), ended
            start = _next(file, at + bool(ended))
        if lost is not None:
            yield Gap(lost[0], size, lost[1])
    if not seen:
        raise FormatError(path, "not a web archive", wanted="records that begin with WARC/1.")


def _behind(file: IO[bytes], at: int, length: int) -> int:
    """Where the record ends that begins at a byte of the text and has so many bytes of content."""
    at = file.seek(at)
    return at + max(0, file.read(_BLOCK).find(_BLANK)) + length + 2 * len(_BLANK)


def _next(file: IO[bytes], at: int) -> int:
    """Where a record may begin, from a byte of the text on; -1 where none does."""
    at = file.seek(at)
    held = file.read(len(_WARC))
    if held == _WARC:
        return at
    while more := file.read(_BLOCK):
        held += more
        found = held.find(b"\r\n" + _WARC)
        if found >= 0:
            return at + found + 2
        kept = held[-len(_WARC) - 1 :]
        at, held = at + len(held) - len(kept), kept
    return -1


def _page(record: WarcRecord, html: bool, plain: bool, whole: bool, at: int) -> Page | LeftOut | Gap:
    kind, headers = record.record_type, record.headers
    key, url = record.record_id or "", (headers.get("WARC-Target-URI") or "").strip("<>")
    response = html and kind == WarcRecordType.response
    if not response and not (plain and kind == WarcRecordType.conversion):
        return LeftOut(f"{kind} record", key, url)
    if response and (status := _status(record)) != 200:
        return LeftOut(f"status {status}", key, url)
    if response and (record.http_content_type or "").lower() not in HTML:
        return LeftOut("not HTML", key, url)
    data: bytes = record.reader.read(LONGEST_PAGE + 1)
    if len(data) > LONGEST_PAGE:
        return LeftOut("too long", key, url)
    coding: Any = record.http_headers or {}
    coded = coding.get("Content-Encoding") or coding.get("Transfer-Encoding")
    if len(data) < record.content_length and not coded:
        return Gap(at, at, f"a record of {record.content_length:,} bytes has {len(data):,}", "cut off")
    title, text = "", ""
    if response:
        title, text = html_text(data, record.http_charset or "", whole=whole)
    else:
        text = data.decode("utf-8", "replace").strip()
    return Page(key, url, title, text) if text else LeftOut("no text", key, url, title)


def _status(record: WarcRecord) -> Any:
    return record.http_headers.status_code if record.http_headers else None


def html_page(path: Path, *, whole: bool = False) -> Iterator[Page | LeftOut | Gap]:
    """A file that is one page of HTML; its path is its id and its address."""
    data, name = bytearray(), path.as_posix()
    for piece in pieces(path):
        if isinstance(piece, Gap):
            yield piece
            return
        data += piece.data
        if len(data) > LONGEST_PAGE:
            yield LeftOut("too long", name, name)
            return
    title, text = html_text(bytes(data), whole=whole)
    yield Page(name, name, title, text) if text else LeftOut("no text", name, name, title)
