"""The histogram counts every document once, in the bin of its length."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.inspect import PERCENTILES
from mega_data.length_histogram import (
    document_lengths,
    format_histogram,
    histogram,
    lengths_at_percentiles,
    plot_lengths,
)
from mega_schema.dataset.idx_content import CHUNK
from mega_schema.dataset.indexed_dataset import IndexedDataset, IndexedWriter
from mega_schema.errors import ConfigError


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_every_document_is_counted_once_where_it_belongs(seed, steps, tmp_path):
    rng, lengths = random.Random(seed), list[int]()
    with IndexedWriter(tmp_path / "p", "uint8") as writer:
        for _ in range(rng.randrange(60)):
            sequences = [rng.randrange(1 << rng.randrange(10)) for _ in range(rng.randrange(4))]
            for length in sequences:
                writer.add(np.zeros(length, np.uint8))
            writer.end_document()
            lengths.append(sum(sequences))
    data = IndexedDataset(tmp_path / "p")
    assert [length for part in document_lengths(data) for length in part.tolist()] == lengths
    bins = histogram(data, steps)
    assert bins.empty == lengths.count(0)
    assert sum(bins.documents) == len(lengths) - bins.empty
    assert sum(bins.tokens) == sum(lengths)
    for low, high, documents, tokens in zip(
        bins.edges, bins.edges[1:], bins.documents, bins.tokens, strict=False
    ):
        inside = [length for length in lengths if low <= length < high]
        assert (documents, tokens) == (len(inside), sum(inside))
    if max(lengths, default=0):
        assert bins.documents[0] > 0
        assert bins.documents[-1] > 0
        assert len(format_histogram(bins)) == len(bins.documents)


def test_lengths_of_more_documents_than_a_chunk_are_right(tmp_path):
    lengths = np.arange(CHUNK + 7, dtype=np.int32) % 2
    with IndexedWriter(tmp_path / "p", "uint8") as writer:
        writer.extend(np.zeros(lengths.sum(), np.uint8), lengths)
    parts = list(document_lengths(IndexedDataset(tmp_path / "p")))
    assert len(parts) == 2
    assert (np.concatenate(parts) == lengths).all()


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_are_numpys(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 1 << rng.integers(1, 31), rng.integers(1, 300)).astype(np.int32)
    wanted = np.percentile(lengths, PERCENTILES, method="nearest").tolist()
    assert list(lengths_at_percentiles(lengths, PERCENTILES)) == wanted


def test_the_bars_are_as_long_as_their_counts(tmp_path):
    with IndexedWriter(tmp_path / "p", "uint8") as writer:
        for length in (0, 1, 2, 3, 5):
            writer.add(np.zeros(length, np.uint8))
            writer.end_document()
    assert format_histogram(histogram(IndexedDataset(tmp_path / "p"))) == [
        f"     1  {'█' * 20:40}  1",
        f"2 to 3  {'█' * 40}  2",
        f"4 to 7  {'█' * 20:40}  1",
    ]


@pytest.mark.parametrize("documents", [0, 1, 500])
def test_the_picture_is_a_png(documents, tmp_path, monkeypatch):
    with IndexedWriter(tmp_path / "p", "uint16") as writer:
        for n in range(documents):
            writer.add(np.zeros(n, np.uint16))
            writer.end_document()
    words = ["inspect", str(tmp_path / "p"), "--plot", str(tmp_path / "p.png")]
    output = CliRunner().invoke(commands, words, catch_exceptions=False).stdout
    assert output.endswith("p.png: the documents' lengths\n")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot: needs matplotlib; hint: pip install .*mega-data\[plot\]"):
        plot_lengths(IndexedDataset(tmp_path / "p"), tmp_path / "q.png")
