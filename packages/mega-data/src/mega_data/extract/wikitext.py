"""Convert wikitext to plain text: no templates, tables, notes, files, categories, links or markup.

The output follows WikiExtractor (github.com/attardi/wikiextractor) with --no-templates: templates are dropped
and not expanded; a paragraph, a heading or a list item is a line; a heading without text below it is dropped.
Each pass reads the text once, even with nested or unclosed elements, so a malicious page takes linear time.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Final

_MAX_LINK_DEPTH = 8  # a caption may contain a link; deeper nesting is no text
_DROPPED_ELEMENTS: Final = (
    "ref|references|gallery|timeline|score|hiero|imagemap|graph|mapframe|maplink|templatedata|indicator"
)
_VERBATIM_ELEMENTS: Final = "nowiki|math|chem|ce|pre|syntaxhighlight|source"
_ELEMENT = re.compile(
    rf"<!--|-->|<(/?)({_DROPPED_ELEMENTS}|{_VERBATIM_ELEMENTS})\b([^<>]{{0,2000}})>", re.IGNORECASE
)
_VERBATIM_NAMES = frozenset(_VERBATIM_ELEMENTS.split("|"))
_PARAMETER = re.compile(r"\{\{\{[^{}]{0,500}\}\}\}")
_BRACES = re.compile(r"\{\{|\}\}|^[ \t:*#]*\{\||^[ \t]*\|\}(?!\})", re.MULTILINE)
_BRACKETS = re.compile(r"\[\[|\]\]")
_EXTERNAL_LINK = re.compile(
    r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]]{0,1000}[ \t]*([^\[\]\n]{0,1000})\]", re.IGNORECASE
)
_DISAMBIGUATION = re.compile(r" ?\([^()]*\)$")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,10}){0,2}")
_TAG = re.compile(r"</?([a-zA-Z][a-zA-Z0-9]{0,20})\b[^<>]{0,1000}>")
_BREAKS = frozenset({"br", "p", "div", "li", "tr", "blockquote"})
_MAGIC_WORD = re.compile(r"__[A-Z]{3,40}__")
_EMPTY_BRACKETS = re.compile(r" ?\([ \t,;:–-]{0,40}\)")
_OPEN_BRACKET = re.compile(r"\([ \t]{0,9}[,;][ \t]{0,9}")
_BEFORE_MARK = re.compile(r"[ \t]{1,9}([,.;:)])(?=\s|$)", re.MULTILINE)
_SPACES = re.compile(r"[ \t\u00a0\u2009\u202f]+")
_ITEM = re.compile(r"[*#:;]+")
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")  # placeholder of verbatim text while markup is removed


class Wikitext:
    """The markup of one wiki.

    Args:
        hidden: its names of the media, file and category namespaces; the English ones are always included.
    """

    def __init__(self, hidden: Iterable[str] = ()) -> None:
        known = ("media", "file", "image", "category")
        self._hidden = frozenset(known) | {name.casefold() for name in hidden}

    def to_text(self, text: str) -> str:
        """Return the text of a page, one paragraph a line; "" if there is none."""
        verbatim = list[str]()
        text = _strip_elements(text.replace("\ue000", "").replace("\ue001", ""), verbatim)
        text = _strip_braces(_PARAMETER.sub("", text))
        text = _EXTERNAL_LINK.sub(r"\1", self._replace_links(text))
        text = re.sub("'{2,}", "", text)
        text = _TAG.sub(lambda tag: "\n" if tag[1].lower() in _BREAKS else "", _MAGIC_WORD.sub("", text))
        text = _SPACES.sub(" ", html.unescape(text))
        text = _OPEN_BRACKET.sub("(", _EMPTY_BRACKETS.sub("", text))
        text = _BEFORE_MARK.sub(r"\1", text)
        text = "\n".join(_layout_lines(text.split("\n")))
        return _PLACEHOLDER.sub(lambda place: _restore_verbatim(verbatim, int(place[1])), text).strip()

    def _replace_links(self, text: str) -> str:
        """Replace links by their visible text, per paragraph: an unclosed link affects no other paragraph."""
        return "\n\n".join(map(self._replace_paragraph_links, text.split("\n\n")))

    def _replace_paragraph_links(self, text: str) -> str:
        stack = [list[str]()]
        position = 0
        for token in _BRACKETS.finditer(text):
            stack[-1].append(text[position : token.start()])
            position = token.end()
            if token[0] == "[[":
                if len(stack) <= _MAX_LINK_DEPTH:
                    stack.append([])
            elif len(stack) > 1:
                inner = "".join(stack.pop())
                stack[-1].append(self._link_text(inner))
        stack[-1].append(text[position:])
        return "".join(part for parts in stack for part in parts)

    def _link_text(self, link: str) -> str:
        target, bar, label = link.partition("|")
        target = target.strip()
        prefix, colon, _ = target.partition(":")
        if colon and prefix.strip().casefold() in self._hidden:
            return ""
        if colon and not bar and _LANGUAGE.fullmatch(prefix):
            return ""  # the same article in another language
        if not bar:
            return target.lstrip(":")
        if label.strip():
            return label
        return _DISAMBIGUATION.sub("", target.rpartition(":")[2])  # text of a link with an empty label


def _strip_elements(text: str, verbatim: list[str]) -> str:
    """Remove comments and elements without text; move verbatim ones to `verbatim`.

    An unclosed comment extends to the end, as in MediaWiki; of other unclosed elements only the tag is
    removed.
    """
    tokens = list(_ELEMENT.finditer(text))
    ends: dict[str, list[int]] = {}
    for number, token in enumerate(tokens):
        if token[0] == "-->" or token[1]:
            ends.setdefault("-->" if token[0] == "-->" else token[2].lower(), []).append(number)
    for numbers in ends.values():
        numbers.reverse()
    out = list[str]()
    position = 0
    number = 0
    while number < len(tokens):
        token = tokens[number]
        out.append(text[position : token.start()])
        position = token.end()
        number += 1
        name = "-->" if token[0] == "<!--" else (token[2] or "").lower()
        if token[0] == "-->" or token[1] or (token[3] or "").endswith("/"):
            continue
        closing = ends.get(name, [])
        while closing and closing[-1] < number:
            closing.pop()
        if closing:
            end = tokens[closing[-1]]
            if name in _VERBATIM_NAMES:
                out.append(f"\ue000{len(verbatim)}\ue001")
                verbatim.append(text[position : end.start()])
            position = end.end()
            number = closing[-1] + 1
        elif name == "-->":
            return "".join(out)
    out.append(text[position:])
    return "".join(out)


def _strip_braces(text: str) -> str:
    """Remove templates and tables with their content; of unclosed ones only the marks."""
    open_braces = list[tuple[str, int, int]]()
    spans = list[tuple[int, int]]()
    open_counts = {"{{": 0, "{|": 0}
    for token in _BRACES.finditer(text):
        mark = token[0].strip(" \t:*#")
        if mark in ("{{", "{|"):
            open_braces.append((mark, *token.span()))
            open_counts[mark] += 1
            continue
        opening = "{{" if mark == "}}" else "{|"
        if not open_counts[opening]:
            spans.append(token.span())
            continue
        while True:
            kind, start, end = open_braces.pop()
            open_counts[kind] -= 1
            if kind == opening:
                spans.append((start, token.end()))
                break
            spans.append((start, end))
    spans += [span[1:] for span in open_braces]
    out = list[str]()
    copied_to = 0
    for start, end in sorted(spans):
        if start >= copied_to:
            out.append(text[copied_to:start])
        copied_to = max(copied_to, end)
    return "".join([*out, text[copied_to:]])


def _layout_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines with text; yield a heading only if text follows before the next of its rank."""
    headings = list[tuple[int, str]]()
    for line in lines:
        line = line.strip()
        if line[:1] == line[-1:] == "=":
            rank = len(line) - len(line.lstrip("="))
            headings = [above for above in headings if above[0] < rank]
            if title := line.strip(" ="):
                headings.append((rank, title))
            continue
        if not line or line[0] in "|!" or not line.strip("-"):
            continue  # rest of a broken table, or a horizontal rule
        if item := _ITEM.match(line):
            mark = item[0][-1]
            line = line[item.end() :].strip()
            if not line:
                continue
            line = f"- {line}" if mark in "*#" else line
        yield from (title for _, title in headings)
        headings = []
        yield line


def _restore_verbatim(verbatim: list[str], number: int) -> str:
    return html.unescape(verbatim[number]).strip() if number < len(verbatim) else ""
