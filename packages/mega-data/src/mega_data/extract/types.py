"""The results of every reader: pages with text, and skipped pages with a reason."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAGE_BYTES = 1 << 24  # of markup; crawlers truncate pages earlier, and wikis refuse pages of 2 MB


@dataclass(frozen=True, slots=True)
class Page:
    """One document.

    Attributes:
        id: id in its source: a page number, or the URN of a record.
    """

    id: str
    url: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class SkippedPage:
    """A part of the source that is not a document.

    Attributes:
        reason: category under which it is counted.
    """

    reason: str
    id: str = ""
    url: str = ""
    title: str = ""
