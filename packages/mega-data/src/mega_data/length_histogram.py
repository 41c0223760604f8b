"""Histogram of document lengths: counts, lines of text, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_schema.app.counts import format_count
from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write
from mega_schema.dataset.idx_content import CHUNK, chunks
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError

_BAR_WIDTH = 40  # characters of the longest bar


@dataclass(frozen=True, slots=True)
class Histogram:
    """Documents by their tokens; bin k holds those of `edges[k]` to `edges[k + 1]` - 1 tokens.

    Attributes:
        empty: documents without tokens, which are in no bin.
        tokens: tokens in the documents of each bin.
    """

    edges: tuple[int, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    empty: int


def histogram(data: IndexedDataset, steps: int = 1) -> Histogram:
    """Count the documents of `data`, `steps` bins for each doubling of their length.

    Reads only the index, a chunk at a time.
    """
    longest = max((int(lengths.max(initial=0)) for lengths in document_lengths(data)), default=0)
    doublings = longest.bit_length()
    exact = {round(2 ** (k / steps)) for k in range(doublings * steps + 1)} if longest else set[int]()
    edges = np.array(sorted(exact), np.int64)
    edges = edges[: int(np.searchsorted(edges, longest, "right")) + 1]
    documents = np.zeros(len(edges), np.int64)
    tokens = np.zeros(len(edges), np.int64)
    empty = 0
    for lengths in document_lengths(data):
        nonempty = lengths[lengths > 0]
        empty += len(lengths) - len(nonempty)
        if len(nonempty):
            bin_index = np.searchsorted(edges, nonempty, "right") - 1
            documents += np.bincount(bin_index, minlength=len(edges))
            np.add.at(tokens, bin_index, nonempty)
    first = int(np.flatnonzero(documents)[0]) if documents.any() else 0  # bins before it are empty
    return Histogram(
        tuple(edges[first:].tolist()),
        tuple(documents[first:-1].tolist()),
        tuple(tokens[first:-1].tolist()),
        empty,
    )


def document_lengths(data: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of each document, in chunks."""
    bounds = data.documents
    for start in range(0, len(bounds) - 1, CHUNK):
        chunk = bounds[start : start + CHUNK + 1]
        lengths: NDArray[Any] = data.lengths[int(chunk[0]) : int(chunk[-1])]
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        yield np.diff(ends[chunk - chunk[0]])


def lengths_at_percentiles(lengths: NDArray[np.int32], percentiles: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths at these percentiles, each one that occurs; () for an empty array.

    Counts the upper halves of the numbers, then the lower halves for the upper halves at the percentiles, so
    memory does not grow with the array. Lengths are not negative.
    """
    if not len(lengths):
        return ()
    ranks = np.rint(np.array(percentiles) / 100 * (len(lengths) - 1)).astype(np.int64)
    upper = np.zeros(1 << 15, np.int64)
    for part in chunks(lengths):
        upper += np.bincount(part >> 16, minlength=len(upper))
    ends = np.cumsum(upper)
    upper_values = np.searchsorted(ends, ranks, "right")
    cumulative = dict[int, NDArray[np.int64]]()
    for upper_value in {*upper_values.tolist()}:
        lower = np.zeros(1 << 16, np.int64)
        for part in chunks(lengths):
            lower += np.bincount(part[part >> 16 == upper_value] & 0xFFFF, minlength=len(lower))
        cumulative[upper_value] = np.cumsum(lower)
    return tuple(
        (upper_value << 16)
        + int(
            np.searchsorted(cumulative[upper_value], rank - (ends[upper_value] - upper[upper_value]), "right")
        )
        for upper_value, rank in zip(upper_values.tolist(), ranks.tolist(), strict=True)
    )


def format_histogram(bins: Histogram) -> list[str]:
    """Format a bar of characters for each bin, for a terminal."""
    highest = max(bins.documents, default=0)
    names = [
        f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"
        for low, high in zip(bins.edges, bins.edges[1:], strict=False)
    ]
    width = max(map(len, names), default=0)
    return [
        f"{name:>{width}}  {'█' * -(-count * _BAR_WIDTH // highest):<{_BAR_WIDTH}}  {count:,}"
        for name, count in zip(names, bins.documents, strict=True)
    ]


def plot_lengths(data: IndexedDataset, output: Path) -> None:
    """Plot documents, and tokens, over the length of the documents, as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        raise ConfigError("--plot", "needs matplotlib", hint=install_hint("mega-data", "plot")) from None
    bins = histogram(data, steps=4)
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    document_axes, token_axes = figure.subplots(2, 1, sharex=True)
    rows = ((document_axes, bins.documents, "documents", "C0"), (token_axes, bins.tokens, "tokens", "C1"))
    for axes, counts, name, colour in rows:
        if counts:
            axes.stairs(counts, bins.edges, fill=True, color=colour, alpha=0.8)
            axes.set_xscale("log", base=2)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    documents = format_count(sum(bins.documents) + bins.empty, "document")
    total = f"{documents} ({bins.empty:,} empty), {format_count(data.tokens, 'token')}"
    document_axes.set_title(f"{data.prefix.name}\n{total}", fontsize="medium")
    token_axes.set_xlabel("tokens of a document")
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png")
