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


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that follows what was before it without a gap.

    Attributes:
        at: byte of the file; of a packed one where that which was unpacked begins.
    """

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes that cannot be read, or not as what they should be.

    Attributes:
        at, until: bytes of the file as it lies on disk.
        why: as whoever read it says it.
        reason: one of few, as it is counted.
    """

    start: int
    end: int
    why: str
    reason: str = "damaged"
