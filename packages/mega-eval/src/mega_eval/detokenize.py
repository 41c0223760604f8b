"""Turns the spaced-out words of WikiText and Penn Treebank back into text, as Megatron's tasks do.

The rules run in order over the whole file as one string. Their quirks (single quotes also pair across
apostrophes, `N` becomes 1) are part of the published numbers and are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from mega_schema.errors import ConfigError

Detokenizer = Callable[[str], str]


def wikitext(text: str) -> str:
    """The text of a `wiki.*.tokens` file as one would write it."""
    text = text.replace("s '", "s'")
    # meant to close up "' 90s", but its slashes are literal, so it touches only text that has them
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text)
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opener, closer in ("()", "[]", "{}", '""', "''"):
        text = _close_up(text, opener, closer)
    for level in (4, 3, 2):
        text = text.replace(" ".join("=" * level), "=" * level)
    for found, wanted in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(found, wanted)
    return text


def ptb(text: str) -> str:
    """The text of a Penn Treebank file as one would write it."""
    rules = (
        (" '", "'"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" n't", "n't"),
        (" N ", "1 "),
        ("$ 1", "$1"),
        ("# 1", "#1"),
    )
    for found, wanted in rules:
        text = text.replace(found, wanted)
    return text


def unchanged(text: str) -> str:
    """The text as it is."""
    return text


DETOKENIZERS: Mapping[str, Detokenizer] = MappingProxyType(
    {"wikitext": wikitext, "ptb": ptb, "none": unchanged}
)


def choose(path: Path, name: str | None) -> str:
    """The name of the detokenizer for a file.

    Args:
        path: without a name, the first of `ptb`, `wiki` and `lambada` that the path contains decides, as in
            Megatron; folders count, so `wiki/ptb.txt` is taken for Penn Treebank.
        name: a key of `DETOKENIZERS` that overrides the path.

    Raises:
        ConfigError: no name is given and the path says nothing.
    """
    if name is not None:
        return name
    for part, chosen in (("ptb", "ptb"), ("wiki", "wikitext"), ("lambada", "none")):
        if part in str(path):
            return chosen
    raise ConfigError(
        "--detokenizer",
        "the path names no data set",
        found=path,
        wanted="a path with ptb, wiki or lambada in it",
        hint=f"--detokenizer {' | '.join(DETOKENIZERS)}",
    )


def _close_up(text: str, opener: str, closer: str) -> str:
    """The text without white space just inside each pair; a quote pairs with the next one there is."""
    left, right = re.escape(opener), re.escape(closer)
    return re.sub(rf"{left}\s*([^{right}]*?)\s*{right}", rf"{opener}\1{closer}", text)
