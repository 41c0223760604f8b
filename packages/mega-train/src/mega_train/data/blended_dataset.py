"""Blend the samples of several datasets by weight or by size, as Megatron core does.

corpus.npy  number.npy    the part of each sample, and which of its samples
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import IndexedDataset, Piece
from mega_train.data.array_cache import Files, write_arrays
from mega_train.data.blend import blend_blocks, dataset_samples, normalize
from mega_train.data.blend_spec import SplitSource

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class PartDataset(Protocol[S_co]):
    """The samples of one dataset."""

    @property
    def dataset(self) -> IndexedDataset: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> S_co: ...

    def pieces(self, i: int) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True)
class BlendWeights:
    """The weights of the parts of a blend.

    Attributes:
        weights: of each part.
        size: samples of the blend.
        is_exhaustive: whether the blend holds every sample of every part.
    """

    weights: NDArray[np.float64]
    size: int
    is_exhaustive: bool

    def write(self, folder: Path, sizes: Sequence[int]) -> None:
        """Write the part of each sample and its number.

        Args:
            sizes: samples of each part.
        """
        files: Files = {"corpus": (np.int16, (self.size,)), "number": (np.int64, (self.size,))}
        limits = np.array(sizes, np.int64) if self.is_exhaustive else None
        blocks = blend_blocks(self.weights, self.size, limits)
        write_arrays(folder, files, ({"corpus": corpus, "number": number} for corpus, number in blocks))


def blend_key(blend: BlendWeights | None) -> dict[str, object]:
    """Return everything that determines the order of a blend, as JSON values."""
    return {
        # hex keeps every bit of a double
        "shares": None if blend is None else [float(weight).hex() for weight in blend.weights],
        "size": None if blend is None else blend.size,
        "all": blend is not None and blend.is_exhaustive,
    }


@dataclass(frozen=True, slots=True)
class PartCounts:
    """Samples of each part of a split.

    Attributes:
        samples: of the split; None for one epoch of each part.
        built: samples to build of each part; None for one epoch.
        added: samples that each part adds, if the parts have weights.
        weights: of the parts, which add up to 1; None weighs them by their size.
    """

    samples: int | None
    built: tuple[int | None, ...]
    added: tuple[int, ...] = ()
    weights: NDArray[np.float64] | None = None

    def weigh_parts(self, sizes: Sequence[int], *, renormalize: bool) -> BlendWeights | None:
        """Return the blend; None for a single part without a weight, whose samples keep their order.

        Args:
            sizes: samples that were built of each part.
            renormalize: weigh the parts by the samples that each adds.
        """
        if self.weights is not None:
            # normalised twice, as in Megatron: the second time may change a last bit, and with it the order
            weights = normalize(self.added if renormalize else self.weights)
            return BlendWeights(weights, sum(self.added), is_exhaustive=False)
        if len(sizes) == 1:
            return None
        size = min(sum(sizes), self.samples or sum(sizes))
        return BlendWeights(normalize(sizes), size, is_exhaustive=self.samples is None)


def plan_part_counts(source: SplitSource, samples: int | None) -> PartCounts:
    """Give each part its share of the samples, and 0.5 % more.

    Args:
        samples: of the split; None takes one whole epoch, and then parts have no weights.
    """
    if source.weights is None:
        parts = len(source.parts)
        return PartCounts(samples, (samples if parts == 1 else None,) * parts)
    assert samples is not None
    weights = normalize(source.weights)
    counts = [dataset_samples(weight, samples, source.blend_rule) for weight in weights.tolist()]
    added, built = zip(*counts, strict=True)
    return PartCounts(samples, built, added, weights)


class BlendedDataset(Generic[S]):
    """The samples of one split, in the order in which the run counts them.

    Attributes:
        parts: the samples of each dataset.
        order: of a blend: the part of each sample, and its number in that part.
    """

    def __init__(
        self, parts: Sequence[PartDataset[S]], order: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self.parts = parts
        self.order = order

    def __len__(self) -> int:
        return len(self.parts[0]) if self.order is None else len(self.order[0])

    def __getitem__(self, i: int) -> S:
        """Return sample `i`; of GPT its tokens, (length + extra,) int64."""
        part, number = self._locate(i)
        return self.parts[part][number]

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to read samples of remote datasets; others need no time to be read."""
        if all(part.dataset.remote is None for part in self.parts):
            return
        by_part: dict[int, list[Piece]] = {}
        for part, number in map(self._locate, numbers):
            by_part.setdefault(part, []).extend(self.parts[part].pieces(number))
        for part, pieces in by_part.items():
            self.parts[part].dataset.prefetch(pieces)

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset of sample `i`."""
        return self.parts[self._locate(i)[0]].dataset.prefix

    def _locate(self, i: int) -> tuple[int, int]:
        if self.order is None:
            return 0, i
        part = int(self.order[0][i])
        # near its end a blend may choose more samples of a part than were built: wrap around
        return part, int(self.order[1][i]) % len(self.parts[part])
