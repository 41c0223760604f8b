"""HTML to its title and the text of its main part, by resiliparse.

`main_content` leaves out navigation, footers and the like by the names of their elements; it is a heuristic.
"""

from __future__ import annotations

import codecs

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding
from resiliparse.parse.html import HTMLTree


def html_text(data: bytes, charset: str = "", *, whole: bool = False) -> tuple[str, str]:
    """The title and the text of a page.

    Args:
        charset: what the server said; the page's own word or a guess where it said nothing that exists.
        whole: keep navigation, footers and the like.
    """
    tree = HTMLTree.parse(_decoded(data, charset))
    text = extract_plain_text(
        tree, preserve_formatting=True, main_content=not whole, list_bullets=True, alt_texts=False
    )
    return " ".join((tree.title or "").split()), text.strip()


def _decoded(data: bytes, charset: str) -> str:
    try:
        name = codecs.lookup(charset).name if charset else ""
    except LookupError:
        name = ""
    name = name or detect_encoding(data, from_html_meta=True) or "utf-8"
    return bytes_to_str(data, name, errors="replace")
