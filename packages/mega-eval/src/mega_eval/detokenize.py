"""Detokenize WikiText and Penn Treebank files with the rules of Megatron's tasks.

The rules run in order over the whole file as one string. Their quirks (single quotes also pair across
apostrophes, `N` becomes 1) are part of the published numbers, so they are reproduced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from mega_schema.errors import ConfigError

Detokenizer = Callable[[str], str]


def wikitext_detokenizer(text: str) -> str:
    """Detokenize the text of a `wiki.*.tokens` file."""
    text = text.replace("s '", "s'")
    # Megatron meant to join "' 90s", but the slashes are literal, so only text that contains them changes
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text)
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opener, closer in ("()", "[]", "{}", '""', "''"):
        text = _strip_inside(text, opener, closer)
    for level in (4, 3, 2):
        text = text.replace(" ".join("=" * level), "=" * level)
    for old, new in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return text


def ptb_detokenizer(text: str) -> str:
    """Detokenize the text of a Penn Treebank file."""
    rules = (
        (" '", "'"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" n't", "n't"),
        (" N ", "1 "),
        ("$ 1", "$1"),
        ("# 1", "#1"),
    )
    for old, new in rules:
        text = text.replace(old, new)
    return text


def identity(text: str) -> str:
    """Return the text unchanged."""
    return text


DETOKENIZERS: Mapping[str, Detokenizer] = MappingProxyType(
    {"wikitext": wikitext_detokenizer, "ptb": ptb_detokenizer, "none": identity}
)


def choose_detokenizer(path: Path, name: str | None) -> str:
    """Return the name of the detokenizer for a file.

    Args:
        path: without a name, the first of `ptb`, `wiki` and `lambada` that the path contains decides, as in
            Megatron. Folders count: `wiki/ptb.txt` is Penn Treebank.
        name: a key of `DETOKENIZERS` that overrides the path.

    Raises:
        ConfigError: there is no name, and the path contains none of the three words.
    """
    if name is not None:
        return name
    for word, detokenizer in (("ptb", "ptb"), ("wiki", "wikitext"), ("lambada", "none")):
        if word in str(path):
            return detokenizer
    raise ConfigError(
        "--detokenizer",
        "the path names no data set",
        found=path,
        wanted="a path with ptb, wiki or lambada in it",
        hint=f"--detokenizer {' | '.join(DETOKENIZERS)}",
    )


def _strip_inside(text: str, opener: str, closer: str) -> str:
    """Remove the white space just inside each pair; a quote pairs with the next one."""
    opening = re.escape(opener)
    closing = re.escape(closer)
    return re.sub(rf"{opening}\s*([^{closing}]*?)\s*{closing}", rf"{opener}\1{closer}", text)
