"""The XML that MediaWiki publishes of a wiki, `pages-articles.xml`, page by page as it is parsed.

One page is in memory at a time. Articles are the pages of namespace 0 that are no redirect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers.expat import ExpatError, ParserCreate

from mega_data.extract.pages import LONGEST_PAGE, LeftOut, Page
from mega_data.extract.wikitext import Wikitext
from mega_data.readers.packed import opened
from mega_schema.errors import FormatError

_BLOCK = 1 << 16  # bytes given to the parser at a time
_WANTED = frozenset({"base", "namespace", "title", "ns", "id", "model", "text"})
_HIDDEN = frozenset({"-2", "6", "14"})  # media, files and categories: a link to one shows nothing to read


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
    """Handlers of expat that gather whole pages in `ready`."""

    ready: deque[_Raw] = field(default_factory=deque)
    base: str = ""
    hidden: list[str] = field(default_factory=list)  # names of the namespaces in _HIDDEN
    seen: bool = False  # a root element of MediaWiki's
    _page: _Raw | None = None
    _name: str = ""  # of the element whose text is gathered
    _key: str = ""  # of the <namespace> read
    _parts: list[str] = field(default_factory=list)
    _size: int = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._name, self._parts, self._size = (name if name in _WANTED else ""), [], 0
        if name == "page":
            self._page = _Raw()
        elif name == "redirect" and self._page is not None:
            self._page.redirect = True
        elif name == "namespace":
            self._key = attributes.get("key", "")
        elif name == "mediawiki":
            self.seen = True

    def data(self, text: str) -> None:
        if self._name and self._size <= LONGEST_PAGE:
            self._parts.append(text)
            self._size += len(text)

    def end(self, name: str) -> None:
        value, page = "".join(self._parts), self._page
        if name == "page" and page is not None:
            self.ready.append(page)
            self._page = None
        elif name != self._name:
            pass
        elif page is None:
            if name == "base":
                self.base = value
            elif name == "namespace" and self._key in _HIDDEN and value:
                self.hidden.append(value)
        elif name in ("title", "ns", "model", "text"):
            setattr(page, name, value)
        elif name == "id" and not page.id:  # later ones are of its revision and of who wrote it
            page.id = value
        self._name = ""


def dump_pages(path: Path) -> Iterator[Page | LeftOut]:
    """The articles of a dump, plain or compressed, in its order; the pages that are none, by reason.

    A dump that is cut off or damaged gives the pages before that place.
    """
    found, expat = _Parser(), ParserCreate()
    expat.buffer_text = True
    expat.StartElementHandler, expat.EndElementHandler = found.start, found.end
    expat.CharacterDataHandler = found.data
    wikitext: Wikitext | None = None
    try:
        with opened(path) as file:
            last = False
            while not last:
                block = file.read(_BLOCK)
                last = not block
                expat.Parse(block, last)
                while found.ready:
                    wikitext = wikitext or Wikitext(found.hidden)
                    yield _page(found.ready.popleft(), wikitext, found.base)
    except (ExpatError, FormatError) as error:
        if not found.seen:
            raise FormatError(
                path, "not a dump of MediaWiki's", found=error, wanted="<mediawiki> ... in XML"
            ) from None
        yield LeftOut("damaged", f"{path}: {error}")


def _page(raw: _Raw, wikitext: Wikitext, base: str) -> Page | LeftOut:
    if raw.ns.strip() != "0":
        return LeftOut(f"namespace {raw.ns.strip()}")
    if raw.redirect:
        return LeftOut("redirect")
    if raw.model != "wikitext":
        return LeftOut("not wikitext")
    if len(raw.text) > LONGEST_PAGE:
        return LeftOut("too long")
    text = wikitext.plain(raw.text)
    url = f"{base.rpartition('/')[0]}?curid={raw.id}"  # an address that lasts when a page is renamed
    return Page(raw.id, url, raw.title, text) if text else LeftOut("no text")
