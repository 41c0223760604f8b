"""Normalize a text as CCNet does before its n-gram models score it (arXiv:1911.00359)."""

from __future__ import annotations

import re
import unicodedata
from types import MappingProxyType

_DIGIT = re.compile(r"\d")
# CCNet's table, with its entry for the full-width 1
_PUNCTUATION = MappingProxyType(
    str.maketrans(
        dict(zip("，。、∶：？！（）；–～’´━〈〉【】％►", ",.,::?!();-~''-<>[]%-", strict=True))
        | dict.fromkeys("„”“«»１」「《》", '"')
        | {"—": " - ", "．": ". ", "…": "..."}
    )
)
_CONTROLS = MappingProxyType(dict.fromkeys([*range(32), *range(127, 160)]))


def normalize_text(text: str) -> str:
    """Return a text in lower case, without accents and control characters, with 0 for digits, on one line.

    Punctuation of other scripts becomes that of ASCII.
    """
    text = text.strip().lower()
    if not text.isascii():
        decomposed = unicodedata.normalize("NFD", text)
        text = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
    return _DIGIT.sub("0", text).translate(_PUNCTUATION).translate(_CONTROLS)
