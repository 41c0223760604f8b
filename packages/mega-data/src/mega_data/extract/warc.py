"""WARC files, as crawlers write them: pages of HTML, or the plain text that a WET file has for each.

The file may be plain, .gz, .zst or .lz4, which FastWARC sees by its first bytes, or .bz2 and .xz.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

from mega_data.extract.html import html_text
from mega_data.extract.pages import LONGEST_PAGE, LeftOut, Page
from mega_data.shards import opened

HTML = ("text/html", "application/xhtml+xml")


def warc_pages(
    path: Path, *, html: bool = True, plain: bool = True, whole: bool = False
) -> Iterator[Page | LeftOut]:
    """The pages of a file in its order. A record that cannot be read is one that is left out.

    Args:
        html: take responses that are HTML.
        plain: take conversions to plain text, which are what a WET file has.
        whole: as in `html_text`.
    """
    with ExitStack() as stack:
        packed = path.suffix in (".bz2", ".xz")
        source = stack.enter_context(opened(path)) if packed else stack.enter_context(path.open("rb"))
        records = ArchiveIterator(source, parse_http=html, auto_decode="all")
        number = 0
        while True:
            number += 1
            try:
                record = next(records, None)
                if record is None:
                    return
                yield _page(record, html, plain, whole)
            except (OSError, EOFError, ValueError) as error:
                yield LeftOut("damaged", f"{path}: record {number}: {error}")
                return  # where the next one begins is not known


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
    return data if len(data) <= LONGEST_PAGE else LeftOut("too long")


def html_page(path: Path, *, whole: bool = False) -> Iterator[Page | LeftOut]:
    """A file that is one page of HTML; its path is its id and its address."""
    with opened(path) as file:
        data = file.read(LONGEST_PAGE + 1)
    if len(data) > LONGEST_PAGE:
        yield LeftOut("too long")
        return
    title, text = html_text(data, whole=whole)
    yield Page(path.as_posix(), path.as_posix(), title, text) if text else LeftOut("no text")
