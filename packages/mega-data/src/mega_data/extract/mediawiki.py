"""Read MediaWiki's XML dump of a wiki, `pages-articles.xml`, page by page.

Each `<page>` element is parsed by itself. So a dump can be split anywhere, each part has the pages that begin
in it, and a damaged page affects no other. One page is in memory at a time. Articles are the pages of
namespace 0 that are not redirects.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.parsers.expat import ExpatError, ParserCreate

from mega_data.extract.types import MAX_PAGE_BYTES, Page, SkippedPage
from mega_data.extract.wikitext import Wikitext
from mega_data.readers.compression import DamagedRange, TextPiece, read_pieces
from mega_data.readers.magic import detect_compression
from mega_schema.errors import FormatError

_ELEMENTS = frozenset({"base", "namespace", "title", "ns", "id", "model", "text"})
# media, files and categories: a link to one has no text
_HIDDEN_NAMESPACES = frozenset({"-2", "6", "14"})
_MAX_HEADER_BYTES = 1 << 20  # before the first page
_BZIP2_BLOCK_BYTES = 1 << 21  # at least one bz2 block begins in as many bytes
_TAG = re.compile(rb"</?page>|</mediawiki>")
_LONGEST_TAG: Final = 12  # bytes
_ENCODING = re.compile(rb"<\?xml[^>]{1,100}encoding=[\"']([A-Za-z0-9._-]{1,40})[\"']")


@dataclass(slots=True)
class _PageFields:
    """The fields of a <page>."""

    title: str = ""
    ns: str = ""
    id: str = ""
    model: str = "wikitext"
    text: str = ""
    redirect: bool = False


@dataclass(slots=True)
class _PageParser:
    """Expat handlers for one page, or for the header before the first."""

    page: _PageFields = field(default_factory=_PageFields)
    base: str = ""
    hidden: list[str] = field(default_factory=list)  # names of _HIDDEN_NAMESPACES
    _name: str = ""  # of the element whose text is collected
    _key: str = ""  # of the current <namespace>
    _parts: list[str] = field(default_factory=list)
    _size: int = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._name = name if name in _ELEMENTS else ""
        self._parts = []
        self._size = 0
        if name == "redirect":
            self.page.redirect = True
        elif name == "namespace":
            self._key = attributes.get("key", "")

    def data(self, text: str) -> None:
        if self._name and self._size <= MAX_PAGE_BYTES:
            self._parts.append(text)
            self._size += len(text)

    def end(self, name: str) -> None:
        value = "".join(self._parts)
        if name != self._name:
            pass
        elif name == "base":
            self.base = value
        elif name == "namespace" and self._key in _HIDDEN_NAMESPACES and value:
            self.hidden.append(value)
        elif name in ("title", "ns", "model", "text"):
            setattr(self.page, name, value)
        elif name == "id" and not self.page.id:  # later ids are of the revision and its author
            self.page.id = value
        self._name = ""


class _ElementParser:
    """Parse one element of the dump while it is read."""

    def __init__(self, encoding: str, start: int) -> None:
        self.start = start
        self.parser = _PageParser()
        self.error = ""
        self._expat = ParserCreate(encoding)
        self._expat.buffer_text = True
        self._expat.StartElementHandler = self.parser.start
        self._expat.EndElementHandler = self.parser.end
        self._expat.CharacterDataHandler = self.parser.data

    def feed(self, data: bytes, *, last: bool = False) -> None:
        """Parse more data; ignore it after a first error, which is kept in `error`."""
        if not self.error:
            try:
                self._expat.Parse(data, last)
            except ExpatError as error:
                self.error = str(error)


@dataclass(frozen=True, slots=True)
class _DumpHeader:
    """The header of a dump, before the first page."""

    encoding: str
    is_utf16: bool = False
    base: str = ""
    hidden: tuple[str, ...] = ()


def is_splittable(path: Path) -> bool:
    """Return whether tags can be found in the bytes of a plain or bz2 dump: not in UTF-16."""
    return not _read_header(path).is_utf16


def read_dump(
    path: Path, start: int = 0, end: int | None = None
) -> Iterator[Page | SkippedPage | DamagedRange]:
    """Yield the articles of a dump in order, skipped pages with the reason, and damaged ranges.

    Args:
        start, end: byte range of the file in which pages begin; of a compressed file, in which their blocks
            begin.

    Raises:
        FormatError: the file is not a MediaWiki dump.
    """
    header = _read_header(path)
    wikitext = Wikitext(header.hidden)
    pieces = read_pieces(path, start, end)
    if header.is_utf16:
        pieces = _to_utf8(path, pieces)
    for item in _parse_pages(path, pieces, header.encoding, start, end):
        yield item if isinstance(item, DamagedRange) else _make_page(item, wikitext, header.base)


def _read_header(path: Path) -> _DumpHeader:
    head = b""
    for piece in read_pieces(path):
        if isinstance(piece, DamagedRange):
            if head:
                break
            return _DumpHeader("utf-8")  # the header is lost; the pages may be intact
        head += piece.data
        if b"<page>" in head or len(head) >= _MAX_HEADER_BYTES:
            break
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if is_utf16:
        head = head[: len(head) & ~1].decode("utf-16", "replace").encode()
    declared = _ENCODING.search(head)
    encoding = "utf-8" if is_utf16 or declared is None else declared[1].decode()
    before = head.partition(b"<page>")[0]
    if b"<mediawiki" not in before:
        raise FormatError(path, "not a MediaWiki dump", wanted="<mediawiki> ... in XML")
    try:
        element = _ElementParser(encoding, 0)
        element.feed(before)
    except (LookupError, ValueError) as error:  # ValueError: a multi-byte encoding
        raise FormatError(path, f"encoding {encoding}", found=error, wanted="utf-8") from None
    return _DumpHeader(encoding, is_utf16, element.parser.base, tuple(element.parser.hidden))


def _to_utf8(path: Path, parts: Iterator[TextPiece | DamagedRange]) -> Iterator[TextPiece | DamagedRange]:
    """Convert UTF-16 to UTF-8. After damage the byte alignment is unknown, so the rest is lost."""
    decoder = codecs.getincrementaldecoder("utf-16")()
    for piece in parts:
        if isinstance(piece, TextPiece):
            try:
                yield TextPiece(piece.start, decoder.decode(piece.data).encode(), piece.end)
                continue
            except UnicodeError as error:
                reason = str(error)
        else:
            reason = piece.why
        yield DamagedRange(piece.start, path.stat().st_size, reason)
        return


def _parse_pages(
    path: Path, pieces: Iterator[TextPiece | DamagedRange], encoding: str, start: int, end: int | None
) -> Iterator[_PageParser | DamagedRange]:
    """Parse the pages that begin before byte `end`; yield the damaged ranges too."""
    size = path.stat().st_size
    is_plain = not detect_compression(path)
    buffer = b""
    page = None
    is_closed = False
    limit = -1  # bytes of `buffer` before `end`; -1: all
    for piece in pieces:
        if isinstance(piece, DamagedRange):
            if limit < 0:
                yield piece
            if page is not None:
                yield DamagedRange(page.start, page.start, "a gap within a page", "cut off")
            buffer = b""
            page = None
            limit = min(limit, 0)
            is_closed = piece.end == size
            continue
        if limit < 0 and end is not None and piece.start >= end:
            limit = len(buffer)
        origin = piece.start - len(buffer)
        parsed_to = 0
        buffer += piece.data
        for tag in _TAG.finditer(buffer):
            page_start = origin + tag.start() if is_plain else piece.start
            if page is not None and tag[0] == b"<page>":
                yield DamagedRange(page.start, page_start, "a page without an end", "unparsable")
            elif page is not None:
                page.feed(buffer[parsed_to : tag.end()], last=True)
                yield (
                    DamagedRange(page.start, page_start, page.error, "unparsable")
                    if page.error
                    else page.parser
                )
            page = None
            parsed_to = tag.end()
            is_closed = tag[0] == b"</mediawiki>"
            if tag[0] == b"<page>":
                if 0 <= limit <= tag.start():
                    return
                page = _ElementParser(encoding, page_start)
                page.feed(tag[0])
        buffer_start = max(parsed_to, len(buffer) - _LONGEST_TAG)
        if page is not None:
            page.feed(buffer[parsed_to:buffer_start])
        buffer = buffer[buffer_start:]
        limit = max(limit - buffer_start, 0) if limit >= 0 else -1
        if page is None and limit == 0:
            return
    if page is not None:
        yield DamagedRange(page.start, size, "the file ends within a page", "cut off")
    elif end is None and not is_closed and not (start and _is_closed_before(path, start)):
        yield DamagedRange(size, size, "the file ends before </mediawiki>", "cut off")


def _is_closed_before(path: Path, start: int) -> bool:
    """Return whether the end of the dump is before `start`, or was reported as lost."""
    text = None
    for piece in read_pieces(path, max(0, start - _BZIP2_BLOCK_BYTES)):
        if isinstance(piece, DamagedRange):
            if piece.end == path.stat().st_size:
                return True
            continue
        text = (text or b"")[-_LONGEST_TAG:] + piece.data
        if b"</mediawiki>" in text:
            return True
    return text is None


def _make_page(parser: _PageParser, wikitext: Wikitext, base: str) -> Page | SkippedPage:
    fields = parser.page
    url = f"{base.rpartition('/')[0]}?curid={fields.id}"  # stays valid when a page is renamed
    text = ""
    if fields.ns.strip() != "0":
        reason = f"namespace {fields.ns.strip()}"
    elif fields.redirect:
        reason = "redirect"
    elif fields.model != "wikitext":
        reason = "not wikitext"
    elif len(fields.text) > MAX_PAGE_BYTES:
        reason = "too long"
    else:
        reason = "no text"
        text = wikitext.to_text(fields.text)
    return (
        Page(fields.id, url, fields.title, text)
        if text
        else SkippedPage(reason, fields.id, url, fields.title)
    )
