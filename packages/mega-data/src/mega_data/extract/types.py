"""What the readers of every form give: pages with text, the reasons of those without, and what is lost."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAGE_BYTES = 1 << 24  # bytes of markup; crawlers cut pages long before, and wikis take none of 2 MB


@dataclass(frozen=True, slots=True)
class Page:
    """One document.

    Attributes:
        id: that of its source: a page number, or the URN of a record.
    """

    id: str
    url: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something of the source that is no document.

    Attributes:
        reason: one of few, as it is counted.
    """

    reason: str
    id: str = ""
    url: str = ""
    title: str = ""
