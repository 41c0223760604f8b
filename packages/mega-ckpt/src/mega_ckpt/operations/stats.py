"""Statistics of tensors in one pass with a few rows in memory: norm, range, NaNs, magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.checkpoint.verify import check_cover
from mega_ckpt.tensors.dtypes import as_float64
from mega_ckpt.tensors.parallel_map import Progress, UpdateProgress, no_progress, parallel_map
from mega_ckpt.tensors.row_stream import ReadRows, RowChunk, stream_rows
from mega_schema.arch import table
from mega_schema.checkpoint.reader import Checkpoint


@dataclass(slots=True)
class Stats:
    """Statistics of the finite elements of a tensor, and counts of the others.

    Attributes:
        minimum, maximum: infinite if no element is finite.
        squares: sum of squares of the finite elements.
        magnitudes: exponent -> number of elements with a magnitude in [2**exponent, 2**(exponent + 1)).
    """

    elements: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    total: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    magnitudes: dict[int, int] = field(default_factory=dict)

    @property
    def finite(self) -> int:
        return self.elements - self.nan - self.inf

    def update(self, values: np.ndarray) -> None:
        """Add values, float64."""
        self.elements += values.size
        nan, inf = int(np.count_nonzero(np.isnan(values))), int(np.count_nonzero(np.isinf(values)))
        self.nan, self.inf = self.nan + nan, self.inf + inf
        values = values[np.isfinite(values)] if nan or inf else values.reshape(-1)
        if not values.size:
            return
        self.total += float(values.sum())
        self.squares += float(np.dot(values, values))
        self.minimum, self.maximum = (
            min(self.minimum, float(values.min())),
            max(self.maximum, float(values.max())),
        )
        exponents = np.frexp(values)[1][values != 0] - 1  # frexp's mantissa is from 1/2 up to 1
        self.zeros += values.size - exponents.size
        for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
            self.magnitudes[int(exponent)] = self.magnitudes.get(int(exponent), 0) + int(count)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object; null for values that a tensor without finite elements does not have."""
        has_values = self.finite > 0
        return {
            "elements": self.elements,
            "nan": self.nan,
            "inf": self.inf,
            "zeros": self.zeros,
            "norm": math.sqrt(self.squares),
            "mean": self.total / self.finite if has_values else None,
            "min": self.minimum if has_values else None,
            "max": self.maximum if has_values else None,
            "magnitudes": {str(exponent): self.magnitudes[exponent] for exponent in sorted(self.magnitudes)},
        }


def compute_stats(chunks: Iterator[RowChunk], dtype: str, update: UpdateProgress) -> Stats:
    """Compute the statistics of a tensor from row chunks in the stored dtype."""
    stats = Stats()
    for chunk in chunks:
        stats.update(as_float64(chunk.values, dtype))
        update(chunk.values.nbytes)
    return stats


def checkpoint_stats(
    checkpoint: Checkpoint, progress: Progress = no_progress
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return namespace -> tensor -> its statistics as a JSON object. Checksums are verified while reading.

    Raises:
        FormatError: a piece is damaged.
    """
    check_cover(checkpoint)
    kinds = {
        space: {name: tensor.dtype for name, tensor in entries.items()}
        for space, entries in checkpoint.tensors.items()
    }
    size = sum(piece.bytes for *_, piece in checkpoint.pieces())
    return _stats_of_tensors(lambda space, name: stream_rows(checkpoint, space, name), kinds, size, progress)


def source_stats(
    source: CheckpointSource, progress: Progress = no_progress
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compute the statistics of a checkpoint of any format; its checksums are verified first.

    Raises:
        FormatError: the checkpoint is damaged.
    """
    shapes = {row.name: row.shape for row in table(source.spec)}
    kinds = source.spaces
    source.verify(tuple(kinds))
    return _stats_of_tensors(
        lambda space, name: source.row_chunks(space, name, shapes[name], kinds[space][name]),
        kinds,
        sum(map(source.size, kinds)),
        progress,
    )


def _stats_of_tensors(
    read_rows: ReadRows, kinds: Mapping[str, Mapping[str, str]], size: int, progress: Progress
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compute the statistics of all tensors on all cores."""
    jobs = [(space, name) for space, entries in kinds.items() for name in entries]
    stats: dict[tuple[str, str], Stats] = {}

    def tensor(job: tuple[str, str], update: UpdateProgress) -> None:
        space, name = job
        stats[job] = compute_stats(read_rows(space, name), kinds[space][name], update)

    with progress(size) as update:
        parallel_map(jobs, tensor, update)
    return {space: {name: stats[space, name].to_dict() for name in names} for space, names in kinds.items()}
