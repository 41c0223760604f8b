"""The datasets of a run, opened: one, or thousands at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mega_schema.dataset.dataset_info import sibling
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.identity import TokenizerIdentity, check_same_tokenizer
from mega_train.config import Data
from mega_train.data.blend_spec import Sources, sources
from mega_train.data.mock import MockDataset
from mega_train.data.path_hints import open_dataset


@dataclass(frozen=True, slots=True)
class Corpora:
    """What a run reads, and the datasets that it lies in."""

    sources: Sources
    opened: Mapping[Path, IndexedDataset]

    @classmethod
    def open(cls, data: Data) -> Corpora:
        """Open all that was named.

        Raises:
            ConfigError: what was said means nothing.
            FormatError: a dataset is missing or not whole, or two are of different tokenizers.
        """
        said = sources(data)
        flags = {part.prefix: source.flag for source in said for part in source.parts}
        if data.threads < 1:
            flag = "--num-dataset-builder-threads"
            raise ConfigError(flag, "not a number of threads", found=data.threads, wanted="1 or more")
        opened = dict(zip(flags, _opened(list(flags), data.threads), strict=True))
        corpora = cls(said, opened)
        corpora._check_tokenizers()
        return corpora

    @classmethod
    def alone(cls, corpus: IndexedDataset, data: Data) -> Corpora:
        """A dataset that is open already, in place of what `data` names."""
        return cls(sources(replace(data, path=(str(corpus.prefix),))), {corpus.prefix: corpus})

    @classmethod
    def mock(cls, vocab: int, eod: int, data: Data) -> Corpora:
        """Megatron's mock data, of which --split gives each use its share.

        Args:
            vocab, eod: ids of the tokenizer, and the one that ends a document.

        Raises:
            ConfigError: `data` names a corpus too.
        """
        if data.path or data.path_file or data.by_use:
            raise ConfigError("--mock-data", "excludes --data-path", found="both", wanted="one of them")
        return cls.alone(MockDataset(vocab, eod), replace(data, mock=False))

    @property
    def identity(self) -> TokenizerIdentity | None:
        """The tokenizer of all of them, where one says which."""
        told = self._told()
        return told[0][1] if told else None

    @property
    def tokenizer(self) -> Path | None:
        """A folder of the tokenizer's files, where one lies beside a dataset."""
        folders = (sibling(prefix, ".tokenizer") for prefix in self.opened)
        return next((folder for folder in folders if folder.is_dir()), None)

    def _told(self) -> list[tuple[Path, TokenizerIdentity]]:
        return [(p, corpus.info.tokenizer) for p, corpus in self.opened.items() if corpus.info is not None]

    def _check_tokenizers(self) -> None:
        for prefix, identity in (told := self._told()):
            try:
                check_same_tokenizer(identity, told[0][1], prefix)
            except FormatError as error:
                what = f"was made with another tokenizer than {told[0][0]}"
                hint = "leave one out, or preprocess its text again with the other's tokenizer"
                raise FormatError(prefix, what, found=error.found, wanted=error.wanted, hint=hint) from None


def _opened(prefixes: Sequence[Path], threads: int) -> list[IndexedDataset]:
    """Side by side: on a distant file system most of the time is waiting."""
    if len(prefixes) == 1:
        return [open_dataset(prefixes[0])]
    with ThreadPoolExecutor(min(threads, len(prefixes))) as pool:
        found = list(pool.map(_opened_or_not, prefixes))
    errors = [one for one in found if isinstance(one, FormatError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        first = errors[0]
        raise FormatError(
            first.where,
            f"{first.what}; of {len(prefixes):,} datasets {len(errors):,} cannot be opened",
            hint=first.hint,
        )
    return [one for one in found if isinstance(one, IndexedDataset)]


def _opened_or_not(prefix: Path) -> IndexedDataset | FormatError:
    try:
        return open_dataset(prefix)
    except FormatError as error:
        return error
