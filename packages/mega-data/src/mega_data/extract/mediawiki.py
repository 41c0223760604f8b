"""The XML that MediaWiki publishes of a wiki, `pages-articles.xml`, page by page.

A page is what lies between `<page>` and `</page>`, and is parsed by itself: so a dump can be cut anywhere,
each part having the pages that begin in it, and a page that is damaged spoils no other. One page is in memory
at a time. Articles are the pages of namespace 0 that are no redirect.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.parsers.expat import ExpatError, ParserCreate

from mega_data.extract.packed import packing, pieces
from mega_data.extract.types import LONGEST_PAGE, Gap, LeftOut, Page, Text
from mega_data.extract.wikitext import Wikitext
from mega_schema.errors import FormatError

_WANTED = frozenset({"base", "namespace", "title", "ns", "id", "model", "text"})
_HIDDEN = frozenset({"-2", "6", "14"})  # media, files and categories: a link to one shows nothing to read
_HEAD = 1 << 20  # bytes at most before the first page
_BEFORE = 1 << 21  # bytes in which a block of bz2 begins
_TAG = re.compile(rb"</?page>|</mediawiki>")
_LONGEST_TAG: Final = 12  # bytes
_ENCODING = re.compile(rb"<\?xml[^>]{1,100}encoding=[\"']([A-Za-z0-9._-]{1,40})[\"']")


@dataclass(slots=True)
class _Raw:
    """What a <page> said."""

    title: str = ""
    ns: str = ""
    id: str = ""
    model: str = "wikitext"
    text: str = ""
    redirect: bool = False


@dataclass(slots=True)
class _Parser:
    """Handlers of expat, for one page or for what is before the first."""

    page: _Raw = field(default_factory=_Raw)
    base: str = ""
    hidden: list[str] = field(default_factory=list)  # names of the namespaces in _HIDDEN
    _name: str = ""  # of the element whose text is gathered
    _key: str = ""  # of the <namespace> read
    _parts: list[str] = field(default_factory=list)
    _size: int = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._name, self._parts, self._size = (name if name in _WANTED else ""), [], 0
        if name == "redirect":
            self.page.redirect = True
        elif name == "namespace":
            self._key = attributes.get("key", "")

    def data(self, text: str) -> None:
        if self._name and self._size <= LONGEST_PAGE:
            self._parts.append(text)
            self._size += len(text)

    def end(self, name: str) -> None:
        value = "".join(self._parts)
        if name != self._name:
            pass
        elif name == "base":
            self.base = value
        elif name == "namespace" and self._key in _HIDDEN and value:
            self.hidden.append(value)
        elif name in ("title", "ns", "model", "text"):
            setattr(self.page, name, value)
        elif name == "id" and not self.page.id:  # later ones are of its revision and of who wrote it
            self.page.id = value
        self._name = ""


class _Element:
    """A piece of the dump given to a parser of its own, as it is read."""

    def __init__(self, encoding: str, at: int) -> None:
        self.at, self.found, self.error = at, _Parser(), ""
        self._expat = ParserCreate(encoding)
        self._expat.buffer_text = True
        self._expat.StartElementHandler, self._expat.EndElementHandler = self.found.start, self.found.end
        self._expat.CharacterDataHandler = self.found.data

    def feed(self, data: bytes, *, last: bool = False) -> None:
        """Parse; after a first error, told in `error`, nothing more."""
        if not self.error:
            try:
                self._expat.Parse(data, last)
            except ExpatError as error:
                self.error = str(error)


@dataclass(frozen=True, slots=True)
class _Header:
    """What is before the first page."""

    encoding: str
    wide: bool = False  # in UTF-16
    base: str = ""
    hidden: tuple[str, ...] = ()


def cuttable(path: Path) -> bool:
    """Whether tags are seen in the bytes of a dump that is plain or bz2: whether it is not in UTF-16."""
    return not _header(path).wide


def dump_pages(path: Path, start: int = 0, end: int | None = None) -> Iterator[Page | LeftOut | Gap]:
    """The articles of a dump, plain or compressed, in its order; what is none, by reason; and what is lost.

    Args:
        start, end: bytes of the file: the pages that begin there, in a packed file those that begin in the
            blocks that begin there.

    Raises:
        FormatError: it begins like no dump.
    """
    header = _header(path)
    wikitext = Wikitext(header.hidden)
    parts = pieces(path, start, end)
    if header.wide:
        parts = _narrow(path, parts)
    for found in _elements(path, parts, header.encoding, start, end):
        yield found if isinstance(found, Gap) else _page(found, wikitext, header.base)


def _header(path: Path) -> _Header:
    head = b""
    for piece in pieces(path):
        if isinstance(piece, Gap):
            if head:
                break
            return _Header("utf-8")  # lost; the pages may be there
        head += piece.data
        if b"<page>" in head or len(head) >= _HEAD:
            break
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if wide:
        head = head[: len(head) & ~1].decode("utf-16", "replace").encode()
    named = _ENCODING.search(head)
    encoding = "utf-8" if wide or named is None else named[1].decode()
    before = head.partition(b"<page>")[0]
    if b"<mediawiki" not in before:
        raise FormatError(path, "not a dump of MediaWiki's", wanted="<mediawiki> ... in XML")
    try:
        known = _Element(encoding, 0)
        known.feed(before)
    except (
        LookupError,
        ValueError,
    ) as error:  # ValueError: several bytes a letter, which expat does not read
        raise FormatError(path, f"encoding {encoding}", found=error, wanted="utf-8") from None
    return _Header(encoding, wide, known.found.base, tuple(known.found.hidden))


def _narrow(path: Path, parts: Iterator[Text | Gap]) -> Iterator[Text | Gap]:
    """UTF-16 to UTF-8. After a gap nobody knows which byte is a first one, so the rest is lost."""
    decoder = codecs.getincrementaldecoder("utf-16")()
    for piece in parts:
        if isinstance(piece, Text):
            try:
                yield Text(piece.at, decoder.decode(piece.data).encode())
                continue
            except UnicodeError as error:
                why = str(error)
        else:
            why = piece.why
        yield Gap(piece.at, path.stat().st_size, why)
        return


def _elements(
    path: Path, parts: Iterator[Text | Gap], encoding: str, start: int, end: int | None
) -> Iterator[_Parser | Gap]:
    """The pages that begin in text at bytes before `end`, and the gaps there."""
    size, plain = path.stat().st_size, not packing(path)
    held, page, closed = b"", None, False
    limit = -1  # bytes of `held` that are before `end`; -1: all
    for piece in parts:
        if isinstance(piece, Gap):
            if limit < 0:
                yield piece
            if page is not None:
                yield Gap(page.at, page.at, "a gap within a page", "cut off")
            held, page, limit, closed = b"", None, min(limit, 0), piece.until == size
            continue
        if limit < 0 and end is not None and piece.at >= end:
            limit = len(held)
        origin, done = piece.at - len(held), 0
        held += piece.data
        for tag in _TAG.finditer(held):
            place = origin + tag.start() if plain else piece.at
            if page is not None and tag[0] == b"<page>":
                yield Gap(page.at, place, "a page without an end", "unparsable")
            elif page is not None:
                page.feed(held[done : tag.end()], last=True)
                yield Gap(page.at, place, page.error, "unparsable") if page.error else page.found
            page, done, closed = None, tag.end(), tag[0] == b"</mediawiki>"
            if tag[0] == b"<page>":
                if 0 <= limit <= tag.start():
                    return
                page = _Element(encoding, place)
                page.feed(tag[0])
        tail = max(done, len(held) - _LONGEST_TAG)
        if page is not None:
            page.feed(held[done:tail])
        held, limit = held[tail:], max(limit - tail, 0) if limit >= 0 else -1
        if page is None and limit == 0:
            return
    if page is not None:
        yield Gap(page.at, size, "the file ends within a page", "cut off")
    elif end is None and not closed and not (start and _closed(path, start)):
        yield Gap(size, size, "the file ends before </mediawiki>", "cut off")


def _closed(path: Path, start: int) -> bool:
    """Whether the end of a dump was seen by whoever reads what is before `start`, or told as lost."""
    text = None
    for piece in pieces(path, max(0, start - _BEFORE)):
        if isinstance(piece, Gap):
            if piece.until == path.stat().st_size:
                return True
            continue
        text = (text or b"")[-_LONGEST_TAG:] + piece.data
        if b"</mediawiki>" in text:
            return True
    return text is None


def _page(found: _Parser, wikitext: Wikitext, base: str) -> Page | LeftOut:
    raw = found.page
    url = f"{base.rpartition('/')[0]}?curid={raw.id}"  # an address that lasts when a page is renamed
    text = ""
    if raw.ns.strip() != "0":
        reason = f"namespace {raw.ns.strip()}"
    elif raw.redirect:
        reason = "redirect"
    elif raw.model != "wikitext":
        reason = "not wikitext"
    elif len(raw.text) > LONGEST_PAGE:
        reason = "too long"
    else:
        reason, text = "no text", wikitext.plain(raw.text)
    return Page(raw.id, url, raw.title, text) if text else LeftOut(reason, raw.id, url, raw.title)
