"""Build the sample readers of training, validation and test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from mega_model.distributed.mesh import Axis, Mesh
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.config import DataConfig
from mega_train.data.array_cache import load_or_build
from mega_train.data.blend import MAX_DATASETS
from mega_train.data.blend_spec import DEFAULT_SPLIT, USES, SplitSource
from mega_train.data.blended_dataset import BlendedDataset
from mega_train.data.cache_folders import cache_folders
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.bert_reader import BertReader
from mega_train.data.encoder.encoder_splits import EncoderSplits, build_encoder_splits
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.data.encoder.t5_reader import T5Reader
from mega_train.data.prefix_reader import PrefixReader, add_prompt_prefixes
from mega_train.data.sample_index import SampleIndexSpec
from mega_train.data.sampler import CyclicSampler, Sampler, SequentialSampler
from mega_train.data.sft import PackedSftDataset, SftExamples
from mega_train.data.splits import split_ranges
from mega_train.data.splits_config import DataSplitsConfig
from mega_train.data.task_data import TaskSamples

log = logging.getLogger("mega.train")

RunDatasets = Datasets | SftExamples | SentenceDatasets | TaskSamples


class SampleReader(Protocol):
    """Random access to samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray:
        """Return sample `i`: (length + 1,) tokens, (4, length + 1) of `data.sft`, (5, length + 1)
        of `prefix_reader`; of encoders (5, length)."""

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to read samples that will be asked for."""

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset of sample `i`."""


@dataclass(frozen=True, slots=True)
class DataSplits:
    """The sample readers of a rank.

    Attributes:
        validation, test: by the name of the group; empty where nothing is evaluated.
    """

    training: SampleReader
    validation: Mapping[str, SampleReader]
    test: Mapping[str, SampleReader]

    def __iter__(self) -> Iterator[SampleReader]:
        yield from (self.training, *self.validation.values(), *self.test.values())

    def map(self, wrap: Callable[[SampleReader], SampleReader]) -> DataSplits:
        """Return the splits with every reader wrapped."""
        validation, test = (
            {name: wrap(reader) for name, reader in readers.items()}
            for readers in (self.validation, self.test)
        )
        return DataSplits(wrap(self.training), validation, test)


def build_data_splits(
    config: DataSplitsConfig,
    datasets: RunDatasets | IndexedDataset,
    mesh: Mesh,
) -> DataSplits:
    """Build the sample readers of a run. Rank 0 builds the sample order once and caches it on disk.

    Ranks that cannot see rank 0's files build their own, one per machine.

    Args:
        datasets: the datasets of the run, or a single open one.

    Raises:
        ConfigError: a part contains too few tokens for one sample, or no document with enough sentences.
        FormatError: a dataset for BERT or T5 is not split into sentences.
        MegaError: the sample order cannot be cached in any folder.
    """
    splits = _build_causal_splits(config, datasets, mesh)
    build_row = _row_builder(config, datasets)
    return splits if build_row is None else splits.map(lambda reader: PrefixReader(reader, build_row))


def _row_builder(
    config: DataSplitsConfig, datasets: RunDatasets | IndexedDataset
) -> Callable[[np.ndarray, int], np.ndarray] | None:
    """Return the function that adds prefixes or corrupts spans; None if the objective is causal."""
    if config.span_rule is not None:
        assert isinstance(datasets, Datasets), "resolve refuses --sft"
        assert datasets.span_vocabulary is not None, "prepare looks it up"
        return partial(config.span_rule.corrupt, vocabulary=datasets.span_vocabulary)
    if config.prefix_rule is None:
        return None
    return add_prompt_prefixes if isinstance(datasets, SftExamples) else config.prefix_rule.add_prefixes


def _build_causal_splits(
    config: DataSplitsConfig, datasets: RunDatasets | IndexedDataset, mesh: Mesh
) -> DataSplits:
    if isinstance(datasets, SftExamples):
        return _build_sft_splits(config, datasets, tell=mesh.rank == 0)
    if isinstance(datasets, TaskSamples):
        return DataSplits(datasets.training, datasets.validation, {})
    if isinstance(datasets, SentenceDatasets):
        return _build_encoder_splits(config, datasets, mesh)
    if isinstance(datasets, IndexedDataset):
        datasets = Datasets.from_dataset(datasets, config.options)
    spec = datasets.spec
    training = _index_spec(config, datasets, spec.training, config.train_samples)
    validation, test = (
        {
            source.name: _index_spec(config, datasets, source, count)
            for source in sources
            if count and _has_sequences(source, datasets)
        }
        for sources, count in ((spec.validation, config.valid_samples), (spec.test, config.test_samples))
    )
    folders = cache_folders(config.options, config.save, datasets)

    def open_reader(name: str, spec_of_index: SampleIndexSpec) -> BlendedDataset[np.ndarray]:
        arrays = load_or_build(folders, f"{name}-samples", spec_of_index.cache_key(), spec_of_index.write)
        return spec_of_index.open_dataset(arrays, copy=not config.options.mmap)

    if mesh.rank:
        mesh.barrier()  # rank 0 builds missing indices
    splits = DataSplits(
        open_reader("training", training),
        {name: open_reader("validation", spec_of_index) for name, spec_of_index in validation.items()},
        {name: open_reader("test", spec_of_index) for name, spec_of_index in test.items()},
    )
    if not mesh.rank:
        mesh.barrier()
    return splits


def _build_encoder_splits(config: DataSplitsConfig, sentences: SentenceDatasets, mesh: Mesh) -> DataSplits:
    splits: EncoderSplits = build_encoder_splits(
        sentences.family, sentences.options, config, sentences.datasets, sentences.vocabulary, mesh
    )
    reader = T5Reader if sentences.family == "t5" else BertReader
    return DataSplits(
        reader(splits.training),
        {name: reader(samples) for name, samples in splits.validation.items()},
        {name: reader(samples) for name, samples in splits.test.items()},
    )


def _build_sft_splits(config: DataSplitsConfig, pairs: SftExamples, *, tell: bool) -> DataSplits:
    """Build the packed readers. Every rank packs by itself, which takes only the lengths and little time."""
    data = config.options
    ranges = split_ranges(data.split or DEFAULT_SPLIT, len(pairs), data.split_rule)

    def build(index: int, rows: int) -> PackedSftDataset:
        name = f"the {USES[index]} split"
        packed = PackedSftDataset(
            pairs, ranges[index], length=config.seq_length, rows=rows, seed=config.seed, name=name
        )
        if packed.too_long and tell:
            count = packed.too_long
            examples = ranges[index][1] - ranges[index][0]
            log.warning("%s: %d of %d examples are longer than a sample and left out", name, count, examples)
        return packed

    def build_scored(index: int, rows: int) -> Mapping[str, PackedSftDataset]:
        has_samples = rows > 0 and ranges[index][0] < ranges[index][1]
        return {USES[index]: build(index, rows)} if has_samples else {}

    return DataSplits(
        build(0, config.train_samples),
        build_scored(1, config.valid_samples),
        build_scored(2, config.test_samples),
    )


def build_sampler(data: DataConfig, micro_batch_size: int, dp: Axis, reader: SampleReader) -> Sampler:
    """Build the sampler of this rank.

    Raises:
        ConfigError: a cyclic order has too few samples.
    """
    sizes = (len(reader), micro_batch_size, dp.size, dp.rank)
    return (
        CyclicSampler(*sizes, is_sharded=data.sharding)
        if data.order == "cyclic"
        else SequentialSampler(*sizes)
    )


def _has_sequences(source: SplitSource, datasets: Datasets) -> bool:
    """Whether any part of the source has a sequence."""
    return any(
        len(range(*part.fraction.sequence_range(len(datasets.by_prefix[part.prefix]))))
        for part in source.parts
    )


def _index_spec(
    config: DataSplitsConfig, datasets: Datasets, source: SplitSource, samples: int
) -> SampleIndexSpec:
    if len(source.parts) > MAX_DATASETS:
        raise ConfigError(
            source.flag, "too many datasets", found=len(source.parts), wanted=f"at most {MAX_DATASETS}"
        )
    return SampleIndexSpec.from_source(
        source,
        datasets,
        length=config.seq_length,
        samples=samples,
        seed=config.seed,
        renormalize=config.options.renormalize,
    )
