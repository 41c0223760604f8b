"""Read WARC files: pages of HTML, or the plain text of WET files.

The text is decompressed here and not by FastWARC, so that a damaged range has an offset in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

from mega_data.extract.html import RESILIPARSE, SlowPageError, html_text
from mega_data.extract.types import MAX_PAGE_BYTES, Page, SkippedPage
from mega_data.readers.compression import DamagedRange, ResumableStream, read_pieces
from mega_data.readers.magic import detect_compression
from mega_schema.errors import FormatError

HTML = ("text/html", "application/xhtml+xml")
_BLANK = b"\r\n\r\n"
_WARC = b"WARC/1."
_BLOCK = 1 << 20


def read_warc(
    path: Path,
    *,
    html: bool = True,
    plain: bool = True,
    full_page: bool = False,
    extractor: str = RESILIPARSE,
) -> Iterator[Page | SkippedPage | DamagedRange]:
    """Read the pages of a file in order. After damage, continue at the next record.

    Args:
        html: read responses that are HTML.
        plain: read conversions to plain text, the records of a WET file.
        full_page, extractor: as in `html_text`.

    Raises:
        FormatError: the file has no record.
    """
    has_records = False
    start = 0
    length = 0
    size = path.stat().st_size
    lost: tuple[int, str] | None = None  # offset and reason of the damage, until the next record
    stream = ResumableStream(read_pieces(path)) if detect_compression(path) else None
    with closing(stream) if stream else path.open("rb") as source:
        file = cast("IO[bytes]", source)
        while start >= 0:
            file.seek(start)
            position = start
            reason = "no record"
            try:
                for record in ArchiveIterator(file, parse_http=html, auto_decode="all"):
                    position = start + record.stream_pos
                    reason = ""
                    has_records = True
                    offset = stream.file_offset(position) if stream else position
                    if lost is not None:
                        yield DamagedRange(lost[0], offset, lost[1])
                    lost = None
                    length = int(record.headers.get("Content-Length") or 0)
                    yield _make_page(record, html, plain, full_page, extractor, offset)
            except (OSError, EOFError, ValueError) as error:
                reason = str(error)
            if stream and stream.gap:
                yield stream.gap
                stream.gap = None
                position = stream.tell()
                reason = ""
            elif not reason:
                break
            elif lost is None and has_records:
                record_end = _record_end(file, position, length)
                lost = min(size, stream.file_offset(record_end) if stream else record_end), reason
            start = _next_record(file, position + bool(reason))
        if lost is not None:
            yield DamagedRange(lost[0], size, lost[1])
    if not has_records:
        raise FormatError(path, "not a web archive", wanted="records that begin with WARC/1.")


def _record_end(file: IO[bytes], position: int, length: int) -> int:
    """Return the end offset of a record, given its first byte and its content length."""
    position = file.seek(position)
    return position + max(0, file.read(_BLOCK).find(_BLANK)) + length + 2 * len(_BLANK)


def _next_record(file: IO[bytes], position: int) -> int:
    """Find the next possible start of a record, from a byte of the text on; -1 if there is none."""
    position = file.seek(position)
    buffer = file.read(len(_WARC))
    if buffer == _WARC:
        return position
    while chunk := file.read(_BLOCK):
        buffer += chunk
        index = buffer.find(b"\r\n" + _WARC)
        if index >= 0:
            return position + index + 2
        tail = buffer[-len(_WARC) - 1 :]
        position = position + len(buffer) - len(tail)
        buffer = tail
    return -1


def _make_page(
    record: WarcRecord, html: bool, plain: bool, full_page: bool, extractor: str, start: int
) -> Page | SkippedPage | DamagedRange:
    kind = record.record_type
    headers = record.headers
    record_id = record.record_id or ""
    url = (headers.get("WARC-Target-URI") or "").strip("<>")
    response = html and kind == WarcRecordType.response
    if not response and not (plain and kind == WarcRecordType.conversion):
        return SkippedPage(f"{kind} record", record_id, url)
    if response and (status := _status(record)) != 200:
        return SkippedPage(f"status {status}", record_id, url)
    if response and (record.http_content_type or "").lower() not in HTML:
        return SkippedPage("not HTML", record_id, url)
    data: bytes = record.reader.read(MAX_PAGE_BYTES + 1)
    if len(data) > MAX_PAGE_BYTES:
        return SkippedPage("too long", record_id, url)
    http_headers: Any = record.http_headers or {}
    encoding = http_headers.get("Content-Encoding") or http_headers.get("Transfer-Encoding")
    if len(data) < record.content_length and not encoding:
        return DamagedRange(
            start, start, f"a record of {record.content_length:,} bytes has {len(data):,}", "cut off"
        )
    if response:
        charset = record.http_charset or ""
        return _html_page(data, charset, record_id, url, full_page=full_page, extractor=extractor)
    text = data.decode("utf-8", "replace").strip()
    return Page(record_id, url, "", text) if text else SkippedPage("no text", record_id, url)


def _html_page(
    data: bytes, charset: str, page_id: str, url: str, *, full_page: bool, extractor: str
) -> Page | SkippedPage:
    try:
        title, text = html_text(data, charset, full_page=full_page, extractor=extractor)
    except SlowPageError:
        return SkippedPage(f"too slow for {extractor}", page_id, url)
    return Page(page_id, url, title, text) if text else SkippedPage("no text", page_id, url, title)


def _status(record: WarcRecord) -> Any:
    return record.http_headers.status_code if record.http_headers else None


def read_html(
    path: Path, *, full_page: bool = False, extractor: str = RESILIPARSE
) -> Iterator[Page | SkippedPage | DamagedRange]:
    """Read a file that is one page of HTML; its path is its id and its address."""
    data = bytearray()
    name = path.as_posix()
    for piece in read_pieces(path):
        if isinstance(piece, DamagedRange):
            yield piece
            return
        data += piece.data
        if len(data) > MAX_PAGE_BYTES:
            yield SkippedPage("too long", name, name)
            return
    yield _html_page(bytes(data), "", name, name, full_page=full_page, extractor=extractor)
