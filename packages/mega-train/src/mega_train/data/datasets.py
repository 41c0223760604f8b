"""Open the datasets of a run, in several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mega_schema.dataset.dataset_info import sibling
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_schema.outputs import check_output
from mega_schema.tokenizer.identity import TokenizerIdentity, check_same_tokenizer
from mega_train.config import DataConfig
from mega_train.data.blend_spec import DataSpec, parse_data_spec
from mega_train.data.mock import MockDataset
from mega_train.data.path_hints import open_dataset
from mega_train.data.span_corruption import SpanVocabulary


@dataclass(frozen=True, slots=True)
class Datasets:
    """The open datasets of a run, and the specification of its splits.

    Attributes:
        span_vocabulary: the special tokens of span corruption, for a run with it.
    """

    spec: DataSpec
    by_prefix: Mapping[Path, IndexedDataset]
    span_vocabulary: SpanVocabulary | None = None

    @classmethod
    def open(cls, data: DataConfig) -> Datasets:
        """Open all datasets that the flags name.

        Raises:
            ConfigError: the flags are wrong, or the folder for remote datasets is refused.
            FormatError: a dataset is missing or damaged, or two are of different tokenizers.
        """
        spec = parse_data_spec(data)
        flags = {part.prefix: source.flag for source in spec for part in source.parts}
        if data.threads < 1:
            flag = "--num-dataset-builder-threads"
            raise ConfigError(flag, "not a number of threads", found=data.threads, wanted="1 or more")
        if data.object_storage_cache is not None:
            option = "--object-storage-cache-path"
            check_output(option, data.object_storage_cache, "folder", is_ours=lambda _: True)
        opened = _open_all(list(flags), data.threads, data.object_storage_cache)
        by_prefix = dict(zip(flags, opened, strict=True))
        datasets = cls(spec, by_prefix)
        datasets._check_tokenizers()
        return datasets

    @classmethod
    def from_dataset(cls, dataset: IndexedDataset, data: DataConfig) -> Datasets:
        """Use a dataset that is already open in place of those that `data` names."""
        return cls(parse_data_spec(replace(data, path=(str(dataset.prefix),))), {dataset.prefix: dataset})

    @classmethod
    def mock(cls, vocab: int, eod: int, data: DataConfig) -> Datasets:
        """Build Megatron's mock data, divided by --split.

        Args:
            vocab, eod: vocabulary size of the tokenizer, and its end-of-document id.

        Raises:
            ConfigError: `data` also names a dataset.
        """
        if data.path or data.path_file or data.has_dataset_per_split:
            raise ConfigError("--mock-data", "excludes --data-path", found="both", wanted="one of them")
        return cls.from_dataset(MockDataset(vocab, eod), replace(data, mock=False))

    @property
    def identity(self) -> TokenizerIdentity | None:
        """The identity of the tokenizer that all datasets share; None if no dataset records it."""
        identities = self._identities()
        return identities[0][1] if identities else None

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer's files next to a dataset; None if there is none."""
        folders = (
            sibling(prefix, ".tokenizer") if dataset.remote is None else dataset.remote.tokenizer
            for prefix, dataset in self.by_prefix.items()
        )
        return next((folder for folder in folders if folder.is_dir()), None)

    def _identities(self) -> list[tuple[Path, TokenizerIdentity]]:
        return [(p, corpus.info.tokenizer) for p, corpus in self.by_prefix.items() if corpus.info is not None]

    def _check_tokenizers(self) -> None:
        for prefix, identity in (identities := self._identities()):
            try:
                check_same_tokenizer(identity, identities[0][1], prefix)
            except FormatError as error:
                what = f"has another tokenizer than {identities[0][0]}"
                hint = "leave one out, or preprocess its text again with the other's tokenizer"
                raise FormatError(prefix, what, found=error.found, wanted=error.wanted, hint=hint) from None


def _open_all(prefixes: Sequence[Path], threads: int, cache: Path | None) -> list[IndexedDataset]:
    """Open the datasets in parallel: on a remote file system most of the time is latency."""
    if len(prefixes) == 1:
        return [open_dataset(prefixes[0], cache)]
    with ThreadPoolExecutor(min(threads, len(prefixes))) as pool:
        results = list(pool.map(partial(_try_open, cache=cache), prefixes))
    errors = [result for result in results if isinstance(result, FormatError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        first = errors[0]
        raise FormatError(
            first.where,
            f"{first.what}; of {len(prefixes):,} datasets {len(errors):,} cannot be opened",
            hint=first.hint,
        )
    return [result for result in results if isinstance(result, IndexedDataset)]


def _try_open(prefix: Path, cache: Path | None) -> IndexedDataset | FormatError:
    try:
        return open_dataset(prefix, cache)
    except FormatError as error:
        return error
