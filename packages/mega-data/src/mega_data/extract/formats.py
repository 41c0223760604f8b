"""Which reader a file needs: by name of the form, or by its first bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mega_data.extract.packed import CUTTABLE, packing, pieces
from mega_data.extract.types import Gap, LeftOut, Page, Text
from mega_data.readers.file_tree import FileResolver, is_pipe
from mega_data.readers.packed import unpacked_name
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError

FORMS = ("wiki-dump", "warc", "wet", "html")
_NAMES = (".xml", ".warc", ".wet", ".html", ".htm", ".xhtml")
_HEAD = 4096  # bytes looked at
_HINT = "--from " + " | ".join(FORMS)
PART = 32_000_000  # bytes of a file that are one task


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that are one task: all of them, or a cut of a dump.

    Attributes:
        end: None at the end of the file.
    """

    path: Path
    start: int = 0
    end: int | None = None


def sources(words: Iterable[str | Path]) -> list[Path]:
    """The files, in the order of their whole names whatever the order they are given in; folders are opened.

    Raises:
        ConfigError: a word names none, or a pipe; see `readers.file_tree`.
    """
    files = FileResolver(_of_a_form, f"files or folders with {', '.join(_NAMES[:-1])} or {_NAMES[-1]}")
    found = [path for word in words for path in files.resolve(str(word))]
    files.log_repeats()
    for path in filter(is_pipe, found):
        what, hint = "a pipe is read once, and this command reads twice", "write it to a file first"
        raise ConfigError("--input", what, found=path, hint=hint)
    return sorted(found)


def _of_a_form(path: Path) -> bool:
    ending = Path(unpacked_name(path)).suffix.partition("-")[0]  # a dump's parts are named .xml-p1p41242
    return ending in _NAMES


def form_of(path: Path) -> str:
    """The form of a file, one of FORMS.

    Raises:
        FormatError: it begins like none.
    """
    name = [ending.partition("-")[0] for ending in path.suffixes]  # a dump's parts are named .xml-p1p41242
    if ".warc" in name:
        return "wet" if ".wet" in name else "warc"
    piece = next(pieces(path), None)
    head = piece.data[:_HEAD] if isinstance(piece, Text) else b""
    if head.startswith(b"WARC/"):
        return "wet" if ".wet" in name else "warc"
    if isinstance(piece, Gap) and ".xml" in name:
        return "wiki-dump"  # its beginning is damaged; the pages may be there
    text = head.decode("utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace").casefold()
    if "<mediawiki" in text:
        return "wiki-dump"
    if "<html" in text or "<!doctype html" in text or ".html" in name or ".htm" in name:
        return "html"
    raise FormatError(path, "begins like no form that is known", wanted=" or ".join(FORMS), hint=_HINT)


def cut(inputs: Iterable[Path], form: str = "auto", size: int = PART) -> tuple[Part, ...]:
    """The files, in their order, as the parts that are a task each: dumps of more than `size` bytes are cut.

    Dumps that are plain, or bz2, are read from any place on. Others stay whole, as archives do.

    Raises:
        FormatError: a large file begins like no form.
    """
    found = list[Part]()
    for path in inputs:
        whole = path.stat().st_size
        count = -(-whole // size)
        if count > 1 and not _can_be_cut(path, form):
            count = 1
        edges = [whole * number // count for number in range(1, count)]
        found += [Part(path, *ends) for ends in zip([0, *edges], [*edges, None], strict=True)]
    return tuple(found)


def _can_be_cut(path: Path, form: str) -> bool:
    if packing(path) not in CUTTABLE or (form_of(path) if form == "auto" else form) != "wiki-dump":
        return False
    from mega_data.extract.mediawiki import cuttable

    return cuttable(path)


def pages(part: Part, form: str, *, whole: bool = False) -> Iterator[Page | LeftOut | Gap]:
    """The pages of a file, or those that begin in a part of it.

    Args:
        form: one of FORMS, or `auto`.
        whole: keep navigation and footers of HTML.

    Raises:
        ConfigError: a library that the form needs is not installed.
        FormatError: the file is not of the form at all.
    """
    path = part.path
    form = form_of(path) if form == "auto" else form
    if form == "wiki-dump":
        from mega_data.extract.mediawiki import dump_pages

        return dump_pages(path, part.start, part.end)
    try:
        from mega_data.extract.warc import html_page, warc_pages
    except ImportError as error:
        what, hint = "needs a library that is not installed", install_hint("mega-data", "extract")
        raise ConfigError(path, what, wanted=error.name or "resiliparse", hint=hint) from None
    if form == "html":
        return html_page(path, whole=whole)
    return warc_pages(path, html=form == "warc", plain=form == "wet", whole=whole)
