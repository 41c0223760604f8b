"""Sample index of a split: the samples of its parts, their order, and the part of each sample.

    document.npy  sample.npy  shuffle.npy    a SampleIndex of each part, one after the other
    corpus.npy    number.npy                 of a blend: the part of each sample, and which of its samples

One rank builds it once (`array_cache`); all ranks map it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.data.array_cache import Arrays, Files, write_arrays
from mega_train.data.blend_spec import SplitSource
from mega_train.data.blended_dataset import BlendedDataset, BlendWeights, blend_key, plan_part_counts
from mega_train.data.datasets import Datasets
from mega_train.data.gpt_dataset import (
    EpochPlan,
    GPTDataset,
    SampleIndex,
    build_sample_index,
    not_enough_tokens_error,
    plan_epochs,
    shuffle_dtype,
)
from mega_train.data.splits import Range

_FORMAT = 1
_CHUNK = 1 << 22  # lengths hashed at a time


@dataclass(frozen=True, slots=True)
class DatasetSlice:
    """A range of a dataset's sequences, and the passes over them."""

    dataset: IndexedDataset
    sequences: Range
    epoch_plan: EpochPlan

    @property
    def documents(self) -> int:
        """Sequences of all epochs."""
        return (self.sequences[1] - self.sequences[0]) * self.epoch_plan.epochs

    def cache_key(self) -> dict[str, object]:
        """Return everything but the seed that determines its index."""
        digest = blake2b(digest_size=16)
        lengths = self.dataset.lengths[slice(*self.sequences)]
        for offset in range(0, len(lengths), _CHUNK):
            digest.update(lengths[offset : offset + _CHUNK].tobytes())
        return {"lengths": digest.hexdigest(), "from": self.sequences[0], **asdict(self.epoch_plan)}

    def build(self, seed: int) -> SampleIndex:
        numbers = np.arange(*self.sequences, dtype=np.int32)
        return build_sample_index(self.dataset.lengths, numbers, self.epoch_plan, seed)


@dataclass(frozen=True, slots=True)
class SampleIndexSpec:
    """Specification of a sample index.

    Attributes:
        blend: None with one slice, whose samples keep their order.
    """

    slices: tuple[DatasetSlice, ...]
    blend: BlendWeights | None
    seed: int

    @classmethod
    def from_source(
        cls,
        source: SplitSource,
        datasets: Datasets,
        *,
        length: int,
        samples: int | None,
        seed: int,
        renormalize: bool = False,
    ) -> SampleIndexSpec:
        """Plan the index as Megatron core does: each part gets its share of the samples and 0.5 % more.

        Args:
            samples: number of samples; None takes one whole epoch, and then parts have no weights.
            renormalize: weigh the parts by the samples that each adds.

        Raises:
            ConfigError: a part has no sample.
        """
        counts = plan_part_counts(source, samples)
        slices = _dataset_slices(source, datasets, counts.built, length)
        sizes = [dataset_slice.epoch_plan.count for dataset_slice in slices]
        return cls(slices, counts.weigh_parts(sizes, renormalize=renormalize), seed)

    def cache_key(self) -> dict[str, object]:
        """Return everything that determines the index, as JSON values."""
        blend = self.blend
        return {
            "format": _FORMAT,
            "seed": self.seed,
            "parts": [dataset_slice.cache_key() for dataset_slice in self.slices],
            **blend_key(blend),
        }

    def write(self, folder: Path) -> None:
        """Write the arrays, with those of one slice in memory at a time."""
        counts = [dataset_slice.epoch_plan.count for dataset_slice in self.slices]
        files: Files = {
            "document": (np.int32, (sum(dataset_slice.documents for dataset_slice in self.slices),)),
            "sample": (np.int64, (sum(counts) + len(counts), 2)),
            "shuffle": (shuffle_dtype(max(counts)), (sum(counts),)),
        }
        indices = (dataset_slice.build(self.seed) for dataset_slice in self.slices)
        write_arrays(folder, files, ({name: getattr(index, name) for name in files} for index in indices))
        if self.blend is not None:
            self.blend.write(folder, counts)

    def open_dataset(self, arrays: Arrays, *, copy: bool = False) -> BlendedDataset[np.ndarray]:
        """Open the samples by the arrays that `write` wrote."""
        documents = [0, *accumulate(dataset_slice.documents for dataset_slice in self.slices)]
        firsts = [0, *accumulate(dataset_slice.epoch_plan.count for dataset_slice in self.slices)]
        parts = []
        for k, dataset_slice in enumerate(self.slices):
            index = SampleIndex(
                arrays["document"][documents[k] : documents[k + 1]],
                arrays["sample"][firsts[k] + k : firsts[k + 1] + k + 1],
                arrays["shuffle"][firsts[k] : firsts[k + 1]],
                dataset_slice.epoch_plan.epochs,
            )
            parts.append(
                GPTDataset(dataset_slice.dataset, index, extra=dataset_slice.epoch_plan.extra, copy=copy)
            )
        order = None if self.blend is None else (arrays["corpus"], arrays["number"])
        return BlendedDataset(parts, order)


def _dataset_slices(
    source: SplitSource, datasets: Datasets, counts: Sequence[int | None], length: int
) -> tuple[DatasetSlice, ...]:
    slices, empty = [], []
    for part, samples in zip(source.parts, counts, strict=True):
        dataset = datasets.by_prefix[part.prefix]
        sequences = part.fraction.sequence_range(len(dataset))
        tokens = int(dataset.lengths[slice(*sequences)].sum(dtype=np.int64))
        epoch_plan = plan_epochs(tokens, length=length, samples=samples, separate_below=source.separate_below)
        if epoch_plan is None:
            found = f"{tokens} tokens in {sequences[1] - sequences[0]} sequences"
            empty.append((part.prefix, found, 2 if samples else length + 1))
        else:
            slices.append(DatasetSlice(dataset, sequences, epoch_plan))
    if empty:
        prefix, found, wanted = empty[0]
        part_name = f"the {source.name} split"
        if len(source.parts) > 1:
            part_name += f" of {prefix}"
            if len(empty) > 1:
                found += f"; as few in {len(empty):,} of {len(source.parts):,} datasets"
        raise not_enough_tokens_error(found, wanted, source.flag, part_name)
    return tuple(slices)
