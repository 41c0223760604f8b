"""Extract the title and the main text of HTML with resiliparse.

`main_content` is a heuristic that omits navigation, footers and the like by the names of their elements. Its
time grows with the sum of the depths of all elements, so one page of nested elements could take hours. If
that sum is more than MAX_DEPTH_SUM, the whole page is extracted.
"""

from __future__ import annotations

import codecs
from typing import Final

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding
from resiliparse.parse.html import DOMContext, HTMLTree, traverse_dom

MAX_DEPTH_SUM: Final = 10_000_000  # about a second; a page of 5,000 elements 40 deep has 200,000


def html_text(data: bytes, charset: str = "", *, full_page: bool = False) -> tuple[str, str]:
    """Return the title and the text of a page.

    Args:
        charset: charset of the HTTP header; if empty or unknown, that of the page or a guess.
        full_page: keep navigation, footers and the like.
    """
    markup = _decode(data, charset)
    tree = HTMLTree.parse(markup)
    main = not full_page and not _is_too_deep(tree, markup)
    text = extract_plain_text(
        tree, preserve_formatting=True, main_content=main, list_bullets=True, alt_texts=False
    )
    return " ".join((tree.title or "").split()), text.strip()


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
