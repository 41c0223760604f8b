"""Which reader a file needs: by name of the form, or by its first bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mega_data.readers.packed import opened, unpacked_name
from mega_schema.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from mega_data.extract.pages import LeftOut, Page

FORMS = ("wiki-dump", "warc", "wet", "html")
_NAMES = (".xml", ".warc", ".wet", ".html", ".htm", ".xhtml")
_HEAD = 4096  # bytes looked at
_HINT = "--from " + " | ".join(FORMS)


def sources(inputs: Iterable[Path]) -> list[Path]:
    """The files, in the order of their whole names whatever the order they are given in; folders are opened.

    Raises:
        ConfigError: there are none.
    """
    found = set[Path]()
    for path in inputs:
        found.update(filter(_of_a_form, path.rglob("*")) if path.is_dir() else [path])
    if not found:
        raise ConfigError("--input", "no files there", wanted=" or ".join(_NAMES))
    return sorted(found)


def _of_a_form(path: Path) -> bool:
    ending = Path(unpacked_name(path)).suffix.partition("-")[0]  # a dump's parts are named .xml-p1p41242
    return ending in _NAMES and not path.name.startswith(".") and path.is_file()


def form_of(path: Path) -> str:
    """The form of a file, one of FORMS.

    Raises:
        FormatError: it begins like none.
    """
    if ".warc" in path.suffixes:
        return "wet" if ".wet" in path.suffixes else "warc"
    try:
        with opened(path) as file:
            head = file.read(_HEAD)
    except FormatError:  # a damaged one may still have whole records
        head = b""
    if head.startswith(b"WARC/"):
        return "wet" if ".wet" in path.suffixes else "warc"
    text = head.decode("utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace").casefold()
    if "<mediawiki" in text:
        return "wiki-dump"
    if "<html" in text or "<!doctype html" in text or ".html" in path.suffixes or ".htm" in path.suffixes:
        return "html"
    raise FormatError(path, "begins like no form that is known", wanted=" or ".join(FORMS), hint=_HINT)


def pages(path: Path, form: str, *, whole: bool = False) -> Iterator[Page | LeftOut]:
    """The pages of a file.

    Args:
        form: one of FORMS, or `auto`.
        whole: keep navigation and footers of HTML.

    Raises:
        ConfigError: a library that the form needs is not installed.
        FormatError: the file is not of the form at all. What is damaged inside is left out and counted.
    """
    form = form_of(path) if form == "auto" else form
    if form == "wiki-dump":
        from mega_data.extract.dump import dump_pages

        return dump_pages(path)
    try:
        from mega_data.extract.warc import html_page, warc_pages
    except ImportError as error:
        what, hint = "needs a library that is not installed", "pip install 'mega-data[extract]'"
        raise ConfigError(path, what, wanted=error.name or "resiliparse", hint=hint) from None
    if form == "html":
        return html_page(path, whole=whole)
    return warc_pages(path, html=form == "warc", plain=form == "wet", whole=whole)
