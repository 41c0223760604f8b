"""Build the samples of BERT or T5 for training, validation and test, with the blends and splits of GPT.

A split is a range of documents. The mapping of every part and the order of a blend are cached by rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mega_model.distributed.mesh import Mesh
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_train.config.encoder_data import EncoderDataConfig, EncoderFamily
from mega_train.data.array_cache import load_or_build
from mega_train.data.blend_spec import SplitSource
from mega_train.data.blended_dataset import (
    BlendedDataset,
    PartCounts,
    PartDataset,
    blend_key,
    plan_part_counts,
)
from mega_train.data.cache_folders import cache_folders
from mega_train.data.datasets import Datasets
from mega_train.data.encoder import bert_dataset, t5_dataset
from mega_train.data.encoder.bert_dataset import BertDataset, BertRule
from mega_train.data.encoder.ngram_masker import BERT_NGRAMS, T5_NGRAMS, NgramMasker
from mega_train.data.encoder.probabilities import check_probabilities
from mega_train.data.encoder.sentence_mapping import (
    MIN_TARGET,
    MappingRule,
    build_mapping,
    eligible_documents,
)
from mega_train.data.encoder.t5_dataset import T5Dataset, T5Rule
from mega_train.data.encoder.vocabulary import MaskingVocabulary
from mega_train.data.splits import Range
from mega_train.data.splits_config import DataSplitsConfig

Sample = Mapping[str, np.ndarray]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class EncoderSplits:
    """The samples of a run.

    Attributes:
        validation, test: by the name of the group; empty where nothing is evaluated.
    """

    training: BlendedDataset[Sample]
    validation: Mapping[str, BlendedDataset[Sample]]
    test: Mapping[str, BlendedDataset[Sample]]


@dataclass(frozen=True, slots=True)
class DocumentSlice:
    """A range of a dataset's documents, and the rule by which their sentences become samples."""

    dataset: IndexedDataset
    documents: Range
    rule: MappingRule
    samples: int | None

    @property
    def bounds(self) -> np.ndarray:
        """First sentence of each document, and one past the last sentence."""
        first, stop = self.documents
        return self.dataset.documents[first : stop + 1]

    def cache_key(self) -> dict[str, object]:
        """Return everything that determines the mapping, as JSON values."""
        digest = blake2b(np.ascontiguousarray(self.bounds).data, digest_size=16)
        digest.update(np.ascontiguousarray(self.dataset.lengths[self.bounds[0] : self.bounds[-1]]).data)
        size = {"sentences": len(self.dataset), "samples": self.samples}
        return {"format": _FORMAT, "lengths": digest.hexdigest(), **size, **asdict(self.rule)}

    def write(self, folder: Path) -> None:
        """Write the mapping."""
        mapping = build_mapping(self.bounds, self.dataset.lengths, self.rule, self.samples)
        np.save(folder / "mapping.npy", mapping)

    def check_sentences(self, flag: str, split_name: str) -> None:
        """Refuse documents of which no sample can be built.

        Raises:
            FormatError: the dataset is not split into sentences.
            ConfigError: the range has no document with enough sentences.
        """
        documents = self.dataset.documents
        is_unsplit = bool((np.diff(documents) <= 1).all())
        longest = int(self.dataset.lengths.max(initial=0))
        if is_unsplit and (self.rule.min_sentences > 1 or longest > self.rule.target):
            raise FormatError(
                self.dataset.prefix,
                "is not split into sentences",
                found=f"{len(documents) - 1} documents with at most one sequence",
                wanted="a sequence for each sentence",
                hint="mega-data preprocess --split-sentences",
            )
        if not len(eligible_documents(self.bounds, self.dataset.lengths, self.rule.min_sentences)[0]):
            raise ConfigError(
                flag,
                f"{split_name} contains no document that gives a sample",
                found=f"{self.documents[1] - self.documents[0]} documents",
                wanted=f"{self.rule.min_sentences} sentences or more, each of at most 512 tokens",
                hint="another --split or more data; for validation also --eval-iters 0",
            )


@dataclass(frozen=True, slots=True)
class EncoderBuilder:
    """Builds the samples of a family from mappings.

    Attributes:
        config: length and seed of the samples, and their number in each split.
    """

    family: EncoderFamily
    options: EncoderDataConfig
    config: DataSplitsConfig
    vocabulary: MaskingVocabulary

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: a probability or a length is out of range, or T5 has no sentinels.
        """
        for error in check_probabilities(self.options):
            raise error
        least = self._special_tokens + MIN_TARGET
        if self.config.seq_length < least:
            found = self.config.seq_length
            what = f"too short for {self._special_tokens} special tokens and text"
            raise ConfigError("--seq-length", what, found=found, wanted=f"{least} or more")
        if self.family == "t5":
            self.vocabulary.check_sentinels()

    @property
    def _special_tokens(self) -> int:
        return (t5_dataset if self.family == "t5" else bert_dataset).SPECIAL_TOKENS

    @property
    def mapping_rule(self) -> MappingRule:
        has_pairs = self.family == "bert" and self.options.has_pairs
        target = self.config.seq_length - self._special_tokens
        return MappingRule(target, 1 + has_pairs, self.options.short_seq_prob, self.config.seed)

    def open_part(self, dataset: IndexedDataset, mapping: np.ndarray) -> PartDataset[Sample]:
        """Open the samples of a dataset."""
        options, config = self.options, self.config
        if self.family == "t5":
            masker = NgramMasker(self.vocabulary, T5_NGRAMS, options.mask_prob, replaces=False)
            t5_rule = T5Rule(config.seq_length, options.decoder_length, config.seed, options.sample_rule)
            return T5Dataset(dataset, mapping, t5_rule, masker)
        ngrams = BERT_NGRAMS[options.mask_type]
        masker = NgramMasker(self.vocabulary, ngrams, options.mask_prob, replaces=True)
        rule = BertRule(config.seq_length, config.seed, options.has_pairs, options.sample_rule)
        return BertDataset(dataset, mapping, rule, masker)

    def slice_documents(
        self, source: SplitSource, datasets: Datasets, built: Sequence[int | None]
    ) -> list[DocumentSlice]:
        """Divide the documents of a split's datasets.

        Raises:
            FormatError: a dataset is not split into sentences.
            ConfigError: a part has no sample.
        """
        slices = list[DocumentSlice]()
        for part, samples in zip(source.parts, built, strict=True):
            dataset = datasets.by_prefix[part.prefix]
            documents = part.fraction.sequence_range(len(dataset.documents) - 1)
            document_slice = DocumentSlice(dataset, documents, self.mapping_rule, samples)
            part_name = f" of {part.prefix}" if len(source.parts) > 1 else ""
            document_slice.check_sentences(source.flag, f"the {source.name} split{part_name}")
            slices.append(document_slice)
        return slices


@dataclass(frozen=True, slots=True)
class EncoderSplitPlan:
    """The documents of one split, and the samples of each part."""

    source: SplitSource
    counts: PartCounts
    slices: Sequence[DocumentSlice]

    @classmethod
    def from_source(
        cls, source: SplitSource, datasets: Datasets, builder: EncoderBuilder, samples: int
    ) -> EncoderSplitPlan:
        """Plan a split of `samples` samples; raises what `EncoderBuilder.slice_documents` raises."""
        counts = plan_part_counts(source, samples)
        return cls(source, counts, builder.slice_documents(source, datasets, counts.built))

    def open_dataset(self, builder: EncoderBuilder, folders: Sequence[Path]) -> BlendedDataset[Sample]:
        """Open the samples, and build what is not cached."""
        name = f"{builder.family}-samples"
        mappings = [
            load_or_build(folders, name, part.cache_key(), part.write)["mapping"] for part in self.slices
        ]
        parts = [
            builder.open_part(part.dataset, mapping)
            for part, mapping in zip(self.slices, mappings, strict=True)
        ]
        sizes = [len(mapping) for mapping in mappings]
        blend = self.counts.weigh_parts(sizes, renormalize=builder.config.options.renormalize)
        if blend is None:
            return BlendedDataset(parts)
        key = {"format": _FORMAT, **blend_key(blend), "sizes": sizes}
        arrays = load_or_build(folders, "blend", key, partial(blend.write, sizes=sizes))
        return BlendedDataset(parts, (arrays["corpus"], arrays["number"]))


def build_encoder_splits(
    family: EncoderFamily,
    options: EncoderDataConfig,
    config: DataSplitsConfig,
    datasets: Datasets,
    vocabulary: MaskingVocabulary,
    mesh: Mesh,
) -> EncoderSplits:
    """Build the samples of a run. Rank 0 builds the mappings once and caches them on disk.

    Raises:
        FormatError: a dataset is not split into sentences.
        ConfigError: an option is out of range, the tokenizer lacks a token, or a part has no sample.
        MegaError: the mappings cannot be cached in any folder.
    """
    builder = EncoderBuilder(family, options, config, vocabulary)
    folders = cache_folders(config.options, config.save, datasets)
    spec = datasets.spec
    training = EncoderSplitPlan.from_source(spec.training, datasets, builder, config.train_samples)
    validation, test = (
        [
            EncoderSplitPlan.from_source(source, datasets, builder, samples)
            for source in sources
            if samples and _has_documents(source, datasets)
        ]
        for sources, samples in ((spec.validation, config.valid_samples), (spec.test, config.test_samples))
    )
    if mesh.rank:
        mesh.barrier()  # rank 0 builds missing mappings
    splits = EncoderSplits(
        training.open_dataset(builder, folders),
        {plan.source.name: plan.open_dataset(builder, folders) for plan in validation},
        {plan.source.name: plan.open_dataset(builder, folders) for plan in test},
    )
    if not mesh.rank:
        mesh.barrier()
    return splits


def _has_documents(source: SplitSource, datasets: Datasets) -> bool:
    """Whether any part of the source has a document."""
    return any(
        len(range(*part.fraction.sequence_range(len(datasets.by_prefix[part.prefix].documents) - 1)))
        for part in source.parts
    )
