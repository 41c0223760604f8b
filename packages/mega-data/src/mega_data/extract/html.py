"""Extract the title and the main text of HTML with resiliparse.

`main_content` is a heuristic that omits navigation, footers and the like by the names of their elements. Its
time grows with the sum of the depths of all elements, so one page of nested elements could take hours. If
that sum is more than MAX_DEPTH_SUM, the whole page is extracted.

trafilatura is an alternative. It has a limit of CPU time, which grows with the size of the page and is far
above the usual time, so that the result does not depend on the machine.
"""

from __future__ import annotations

import codecs
import logging
from functools import cache
from importlib import import_module
from typing import Any, Final

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding
from resiliparse.parse.html import DOMContext, HTMLTree, traverse_dom

from mega_data.cpu_limit import TimeLimitReached, limit_cpu_seconds
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

RESILIPARSE: Final = "resiliparse"
TRAFILATURA: Final = "trafilatura"
# CPU seconds of trafilatura for a page: usually 0.1 to 0.4 for a megabyte
_PAGE_SECONDS: Final = 10.0
_SECONDS_PER_MEGABYTE: Final = 10.0
MAX_DEPTH_SUM: Final = 10_000_000  # about a second; a page of 5,000 elements 40 deep has 200,000


class SlowPageError(Exception):
    """A page takes an extractor more time than its limit."""


def html_text(
    data: bytes, charset: str = "", *, full_page: bool = False, extractor: str = RESILIPARSE
) -> tuple[str, str]:
    """Return the title and the text of a page.

    Args:
        charset: charset of the HTTP header; if empty or unknown, that of the page or a guess.
        full_page: keep navigation, footers and the like.
        extractor: resiliparse or trafilatura.

    Raises:
        SlowPageError: the page takes trafilatura too long.
    """
    markup = _decode(data, charset)
    tree = HTMLTree.parse(markup)
    title = " ".join((tree.title or "").split())
    if extractor == TRAFILATURA:
        return title, _trafilatura_text(markup).strip()
    main = not full_page and not _is_too_deep(tree, markup)
    text = extract_plain_text(
        tree, preserve_formatting=True, main_content=main, list_bullets=True, alt_texts=False
    )
    return title, text.strip()


@cache
def load_trafilatura() -> Any:
    """Import trafilatura, without its messages about single pages.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        module = import_module("trafilatura")
    except ImportError as error:
        hint = install_hint("mega-data", "trafilatura")
        what = "trafilatura is not installed, or a library that it needs"
        raise ConfigError("--html-extractor", what, found=error, hint=hint) from None
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    return module


def _trafilatura_text(markup: str) -> str:
    """Return the main text of a page; "" for none."""
    extract = load_trafilatura().extract
    try:
        with limit_cpu_seconds(_PAGE_SECONDS + _SECONDS_PER_MEGABYTE * len(markup) / 1e6):
            # its own deduplication remembers earlier pages, so the text would depend on them
            text = extract(markup, favor_precision=True, include_comments=False, deduplicate=False)
    except TimeLimitReached:
        raise SlowPageError from None
    return text or ""


class _TooDeepError(Exception):
    """Stops the walk over a page."""


def _is_too_deep(tree: HTMLTree, markup: str) -> bool:
    """Return whether the depths of all elements of a page add up to more than MAX_DEPTH_SUM."""
    max_elements = markup.count("<")  # upper bound of the number of elements
    if max_elements * (max_elements + 1) // 2 <= MAX_DEPTH_SUM or tree.body is None:
        return False
    total = 0

    def add_depth(element: DOMContext) -> None:
        nonlocal total
        total += element.depth
        if total > MAX_DEPTH_SUM:
            raise _TooDeepError

    try:
        traverse_dom(tree.body, add_depth, None, None, True)
    except _TooDeepError:
        return True
    return False


def _decode(data: bytes, charset: str) -> str:
    try:
        name = codecs.lookup(charset).name if charset else ""
    except LookupError:
        name = ""
    name = name or detect_encoding(data, from_html_meta=True) or "utf-8"
    return bytes_to_str(data, name, errors="replace")
