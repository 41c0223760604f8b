"""What the numbers of a tensor are like: norm, range, NaNs, magnitudes. One pass, a few rows in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import Source
from mega_ckpt.checkpoint.verify import check_cover
from mega_ckpt.tensors.dtypes import numbers
from mega_ckpt.tensors.parallel_map import Progress, Told, each, silent
from mega_ckpt.tensors.row_stream import Band, Bands, stored_bands
from mega_schema.arch import table
from mega_schema.checkpoint import Checkpoint


@dataclass(slots=True)
class Stats:
    """Of the finite numbers of a tensor, but for the counts of the others.

    Attributes:
        least, most: of them; infinite where there are none.
        squares: their sum of squares.
        magnitudes: exponent -> how many numbers have a magnitude from 2**exponent up to twice that.
    """

    elements: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    magnitudes: dict[int, int] = field(default_factory=dict)

    @property
    def finite(self) -> int:
        return self.elements - self.nan - self.inf

    def take(self, values: np.ndarray) -> None:
        """Count more numbers, float64."""
        self.elements += values.size
        nan, inf = int(np.count_nonzero(np.isnan(values))), int(np.count_nonzero(np.isinf(values)))
        self.nan, self.inf = self.nan + nan, self.inf + inf
        values = values[np.isfinite(values)] if nan or inf else values.reshape(-1)
        if not values.size:
            return
        self.total += float(values.sum())
        self.squares += float(np.dot(values, values))
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))
        exponents = np.frexp(values)[1][values != 0] - 1  # frexp's mantissa is from 1/2 up to 1
        self.zeros += values.size - exponents.size
        for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
            self.magnitudes[int(exponent)] = self.magnitudes.get(int(exponent), 0) + int(count)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object: what is not there of an empty or wholly non-finite tensor is null."""
        some = self.finite > 0
        return {
            "elements": self.elements,
            "nan": self.nan,
            "inf": self.inf,
            "zeros": self.zeros,
            "norm": math.sqrt(self.squares),
            "mean": self.total / self.finite if some else None,
            "min": self.least if some else None,
            "max": self.most if some else None,
            "magnitudes": {str(exponent): self.magnitudes[exponent] for exponent in sorted(self.magnitudes)},
        }


def of(bands: Iterator[Band], dtype: str, told: Told) -> Stats:
    """The stats of a tensor, given as it is stored."""
    found = Stats()
    for band in bands:
        found.take(numbers(band.values, dtype))
        told(band.values.nbytes)
    return found


def all_of(checkpoint: Checkpoint, progress: Progress = silent) -> dict[str, dict[str, dict[str, Any]]]:
    """Namespace -> tensor -> its stats as a JSON object. Checksums are checked on the way.

    Raises:
        FormatError: a piece is damaged.
    """
    check_cover(checkpoint)
    kinds = {
        space: {name: tensor.dtype for name, tensor in entries.items()}
        for space, entries in checkpoint.tensors.items()
    }
    size = sum(piece.bytes for *_, piece in checkpoint.pieces())
    return _all(lambda space, name: stored_bands(checkpoint, space, name), kinds, size, progress)


def all_of_source(source: Source, progress: Progress = silent) -> dict[str, dict[str, dict[str, Any]]]:
    """The same of a checkpoint of any format, in our names, its checksums held against it before.

    Raises:
        FormatError: it is damaged.
    """
    shapes, kinds = {row.name: row.shape for row in table(source.spec)}, source.spaces
    source.verify(tuple(kinds))
    return _all(
        lambda space, name: source.bands(space, name, shapes[name], kinds[space][name]),
        kinds,
        sum(map(source.size, kinds)),
        progress,
    )


def _all(
    bands: Bands, kinds: Mapping[str, Mapping[str, str]], size: int, progress: Progress
) -> dict[str, dict[str, dict[str, Any]]]:
    """Of every tensor of some dtypes, which have so many bytes together."""
    jobs = [(space, name) for space, entries in kinds.items() for name in entries]
    found: dict[tuple[str, str], Stats] = {}

    def tensor(job: tuple[str, str], told: Told) -> None:
        space, name = job
        found[job] = of(bands(space, name), kinds[space][name], told)

    with progress(size) as told:
        each(jobs, tensor, told)
    return {space: {name: found[space, name].to_dict() for name in of} for space, of in kinds.items()}
