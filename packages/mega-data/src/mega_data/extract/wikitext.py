"""Wikitext to the plain text a reader sees: no templates, tables, notes, files, categories, links or markup.

What is left out or kept follows WikiExtractor (github.com/attardi/wikiextractor) with --no-templates:
templates are dropped and not expanded; a paragraph, a heading or a list item is a line; a heading without
text below it goes. Each pass reads the text once, whatever is nested or never closed in it, so a page made
to be slow is not.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Final

_DEEPEST_LINK = 8  # a caption has a link in it; more is no text
_DROPPED: Final = (
    "ref|references|gallery|timeline|score|hiero|imagemap|graph|mapframe|maplink|templatedata|indicator"
)
_VERBATIM: Final = "nowiki|math|chem|ce|pre|syntaxhighlight|source"
_MARKED = re.compile(rf"<!--|-->|<(/?)({_DROPPED}|{_VERBATIM})\b([^<>]{{0,2000}})>", re.IGNORECASE)
_VERBATIM_NAMES = frozenset(_VERBATIM.split("|"))
_PARAMETER = re.compile(r"\{\{\{[^{}]{0,500}\}\}\}")
_BRACES = re.compile(r"\{\{|\}\}|^[ \t:*#]*\{\||^[ \t]*\|\}(?!\})", re.MULTILINE)
_BRACKETS = re.compile(r"\[\[|\]\]")
_OUTSIDE = re.compile(
    r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]]{0,1000}[ \t]*([^\[\]\n]{0,1000})\]", re.IGNORECASE
)
_DISAMBIGUATION = re.compile(r" ?\([^()]*\)$")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,10}){0,2}")
_TAG = re.compile(r"</?([a-zA-Z][a-zA-Z0-9]{0,20})\b[^<>]{0,1000}>")
_BREAKS = frozenset({"br", "p", "div", "li", "tr", "blockquote"})
_SWITCH = re.compile(r"__[A-Z]{3,40}__")
_EMPTY_BRACKETS = re.compile(r" ?\([ \t,;:–-]{0,40}\)")
_OPEN_BRACKET = re.compile(r"\([ \t]{0,9}[,;][ \t]{0,9}")
_BEFORE_MARK = re.compile(r"[ \t]{1,9}([,.;:)])(?=\s|$)", re.MULTILINE)
_SPACES = re.compile(r"[ \t\u00a0\u2009\u202f]+")
_ITEM = re.compile(r"[*#:;]+")
_HELD = re.compile("\ue000(\\d+)\ue001")  # stands for verbatim text while markup goes


class Wikitext:
    """A wiki's markup.

    Args:
        hidden: its names for media, files and categories; the English ones are known everywhere.
    """

    def __init__(self, hidden: Iterable[str] = ()) -> None:
        known = ("media", "file", "image", "category")
        self._hidden = frozenset(known) | {name.casefold() for name in hidden}

    def plain(self, text: str) -> str:
        """The text of a page, one paragraph a line; "" where there is nothing to read."""
        held = list[str]()
        text = _without_marked(text.replace("\ue000", "").replace("\ue001", ""), held)
        text = _without_braces(_PARAMETER.sub("", text))
        text = _OUTSIDE.sub(r"\1", self._without_links(text))
        text = re.sub("'{2,}", "", text)
        text = _TAG.sub(lambda tag: "\n" if tag[1].lower() in _BREAKS else "", _SWITCH.sub("", text))
        text = _SPACES.sub(" ", html.unescape(text))
        text = _OPEN_BRACKET.sub("(", _EMPTY_BRACKETS.sub("", text))
        text = _BEFORE_MARK.sub(r"\1", text)
        text = "\n".join(_lines(text.split("\n")))
        return _HELD.sub(lambda place: _held(held, int(place[1])), text).strip()

    def _without_links(self, text: str) -> str:
        """Links as the words they show, paragraph by paragraph: one that is never closed spoils no other."""
        return "\n\n".join(map(self._shown_links, text.split("\n\n")))

    def _shown_links(self, text: str) -> str:
        stack, at = [list[str]()], 0
        for token in _BRACKETS.finditer(text):
            stack[-1].append(text[at : token.start()])
            at = token.end()
            if token[0] == "[[":
                if len(stack) <= _DEEPEST_LINK:
                    stack.append([])
            elif len(stack) > 1:
                inner = "".join(stack.pop())
                stack[-1].append(self._shown(inner))
        stack[-1].append(text[at:])
        return "".join(part for parts in stack for part in parts)

    def _shown(self, link: str) -> str:
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
        return _DISAMBIGUATION.sub("", target.rpartition(":")[2])  # what the bar alone shows


def _without_marked(text: str, held: list[str]) -> str:
    """Comments, and elements whose contents are no text, go; verbatim ones are held back as they are.

    A comment that is never closed lasts to the end, as in MediaWiki; of other elements only the tag goes.
    """
    tokens = list(_MARKED.finditer(text))
    ends: dict[str, list[int]] = {}
    for number, token in enumerate(tokens):
        if token[0] == "-->" or token[1]:
            ends.setdefault("-->" if token[0] == "-->" else token[2].lower(), []).append(number)
    for numbers in ends.values():
        numbers.reverse()
    out, at, number = list[str](), 0, 0
    while number < len(tokens):
        token = tokens[number]
        out.append(text[at : token.start()])
        at, number = token.end(), number + 1
        name = "-->" if token[0] == "<!--" else (token[2] or "").lower()
        if token[0] == "-->" or token[1] or (token[3] or "").endswith("/"):
            continue
        closing = ends.get(name, [])
        while closing and closing[-1] < number:
            closing.pop()
        if closing:
            end = tokens[closing[-1]]
            if name in _VERBATIM_NAMES:
                out.append(f"\ue000{len(held)}\ue001")
                held.append(text[at : end.start()])
            at, number = end.end(), closing[-1] + 1
        elif name == "-->":
            return "".join(out)
    out.append(text[at:])
    return "".join(out)


def _without_braces(text: str) -> str:
    """Templates and tables go with what is in them; of those that have no other end only the marks."""
    opened, spans = list[tuple[str, int, int]](), list[tuple[int, int]]()
    open_now = {"{{": 0, "{|": 0}
    for token in _BRACES.finditer(text):
        mark = token[0].strip(" \t:*#")
        if mark in ("{{", "{|"):
            opened.append((mark, *token.span()))
            open_now[mark] += 1
            continue
        wanted = "{{" if mark == "}}" else "{|"
        if not open_now[wanted]:
            spans.append(token.span())
            continue
        while True:
            kind, start, end = opened.pop()
            open_now[kind] -= 1
            if kind == wanted:
                spans.append((start, token.end()))
                break
            spans.append((start, end))
    spans += [span[1:] for span in opened]
    out, done = list[str](), 0
    for start, end in sorted(spans):
        if start >= done:
            out.append(text[done:start])
        done = max(done, end)
    return "".join([*out, text[done:]])


def _lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines with something to read; headings as they are when text comes before the next of their rank."""
    waiting = list[tuple[int, str]]()
    for line in lines:
        line = line.strip()
        if line[:1] == line[-1:] == "=":
            rank = len(line) - len(line.lstrip("="))
            waiting = [above for above in waiting if above[0] < rank]
            if title := line.strip(" ="):
                waiting.append((rank, title))
            continue
        if not line or line[0] in "|!" or not line.strip("-"):
            continue  # what is left of a broken table, and rules
        if item := _ITEM.match(line):
            mark, line = item[0][-1], line[item.end() :].strip()
            if not line:
                continue
            line = f"- {line}" if mark in "*#" else line
        yield from (title for _, title in waiting)
        waiting = []
        yield line


def _held(held: list[str], number: int) -> str:
    return html.unescape(held[number]).strip() if number < len(held) else ""
