"""How long the documents of a dataset are: counted, as lines of text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write
from mega_schema.dataset.idx_content import CHUNK, chunks
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError

_BAR = 40  # characters of the longest


@dataclass(frozen=True, slots=True)
class Histogram:
    """Documents by their tokens; bin k holds those of `edges[k]` tokens up to `edges[k + 1]` - 1.

    Attributes:
        empty: documents without tokens, which are in no bin.
        tokens: in the documents of each bin.
    """

    edges: tuple[int, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    empty: int


def histogram(data: IndexedDataset, steps: int = 1) -> Histogram:
    """Count the documents of `data`, `steps` bins for each doubling of their length from the shortest on.

    Reads the index alone, a chunk at a time.
    """
    longest = max((int(part.max(initial=0)) for part in document_lengths(data)), default=0)
    doublings = longest.bit_length()
    exact = {round(2 ** (k / steps)) for k in range(doublings * steps + 1)} if longest else set[int]()
    edges = np.array(sorted(exact), np.int64)
    edges = edges[: int(np.searchsorted(edges, longest, "right")) + 1]
    documents, tokens, empty = np.zeros(len(edges), np.int64), np.zeros(len(edges), np.int64), 0
    for part in document_lengths(data):
        full = part[part > 0]
        empty += len(part) - len(full)
        if len(full):
            place = np.searchsorted(edges, full, "right") - 1
            documents += np.bincount(place, minlength=len(edges))
            np.add.at(tokens, place, full)
    first = int(np.flatnonzero(documents)[0]) if documents.any() else 0  # bins before it show nothing
    return Histogram(
        tuple(edges[first:].tolist()),
        tuple(documents[first:-1].tolist()),
        tuple(tokens[first:-1].tolist()),
        empty,
    )


def document_lengths(data: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Tokens of each document, in chunks."""
    bounds = data.documents
    for at in range(0, len(bounds) - 1, CHUNK):
        first = bounds[at : at + CHUNK + 1]
        lengths: NDArray[Any] = data.lengths[int(first[0]) : int(first[-1])]
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        yield np.diff(ends[first - first[0]])


def at_percentiles(lengths: NDArray[np.int32], percentiles: Sequence[int]) -> tuple[int, ...]:
    """The lengths at these percentiles, each one that occurs; none where there are none.

    Counts the upper halves of the numbers and then the lower halves of those in question, so memory does not
    grow with them. They are not negative.
    """
    if not len(lengths):
        return ()
    ranks = np.rint(np.array(percentiles) / 100 * (len(lengths) - 1)).astype(np.int64)
    upper = np.zeros(1 << 15, np.int64)
    for part in chunks(lengths):
        upper += np.bincount(part >> 16, minlength=len(upper))
    ends = np.cumsum(upper)
    places = np.searchsorted(ends, ranks, "right")
    found = dict[int, NDArray[np.int64]]()
    for place in {*places.tolist()}:
        lower = np.zeros(1 << 16, np.int64)
        for part in chunks(lengths):
            lower += np.bincount(part[part >> 16 == place] & 0xFFFF, minlength=len(lower))
        found[place] = np.cumsum(lower)
    return tuple(
        (place << 16) + int(np.searchsorted(found[place], rank - (ends[place] - upper[place]), "right"))
        for place, rank in zip(places.tolist(), ranks.tolist(), strict=True)
    )


def as_lines(found: Histogram) -> list[str]:
    """A bar of characters for each bin, for a terminal."""
    most = max(found.documents, default=0)
    names = [
        f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"
        for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    width = max(map(len, names), default=0)
    return [
        f"{name:>{width}}  {'█' * -(-count * _BAR // most):<{_BAR}}  {count:,}"
        for name, count in zip(names, found.documents, strict=True)
    ]


def draw(data: IndexedDataset, output: Path) -> None:
    """Documents, and tokens, over the length of the documents that hold them, as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        raise ConfigError("--plot", "needs matplotlib", hint=install_hint("mega-data", "plot")) from None
    found = histogram(data, steps=4)
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    rows = ((above, found.documents, "documents", "C0"), (below, found.tokens, "tokens", "C1"))
    for axes, counts, name, colour in rows:
        if counts:
            axes.stairs(counts, found.edges, fill=True, color=colour, alpha=0.8)
            axes.set_xscale("log", base=2)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    total = (
        f"{sum(found.documents) + found.empty:,} documents ({found.empty:,} empty), {data.tokens:,} tokens"
    )
    above.set_title(f"{data.prefix.name}\n{total}", fontsize="medium")
    below.set_xlabel("tokens of a document")
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png")
