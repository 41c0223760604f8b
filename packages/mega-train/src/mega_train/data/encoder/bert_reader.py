"""The datasets of a run of BERT, and its samples as arrays with a row for each kind of value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from mega_model.kernels.reference import IGNORED
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder
from mega_train.config.encoder_data import EncoderDataConfig
from mega_train.data.blended_dataset import BlendedDataset
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.vocabulary import BERT_HINT, MaskingVocabulary

# Rows of a sample: token ids, token types, the original ids of masked tokens or IGNORED, 1 at real tokens,
# and in every column 1 if the segments are swapped.
TOKEN, TYPE, LABEL, REAL, ORDER = range(5)


@dataclass(frozen=True, slots=True)
class SentenceDatasets:
    """The datasets of a run of BERT, with the vocabulary and the options by which they become samples."""

    datasets: Datasets
    vocabulary: MaskingVocabulary
    options: EncoderDataConfig

    @classmethod
    def from_tokenizer(
        cls, datasets: Datasets, tokenizer: Path | Tokenizer | None, options: EncoderDataConfig
    ) -> Self:
        """Look up the special tokens of the tokenizer of the datasets.

        Raises:
            ConfigError: there is no tokenizer, or it has no such tokens.
            FormatError: the tokenizer cannot be read.
        """
        if tokenizer is None:
            raise ConfigError(
                "--tokenizer-type",
                "missing, and no dataset records its tokenizer",
                wanted="the tokenizer of the data, whose words are masked",
                hint=BERT_HINT,
            )
        if isinstance(tokenizer, Path):
            tokenizer = open_tokenizer_folder(tokenizer)
        return cls(datasets, MaskingVocabulary.from_tokenizer(tokenizer), options)


class BertReader:
    """Random access to the samples of a split: (5, length) int64, with the rows of this module."""

    def __init__(self, samples: BlendedDataset[Mapping[str, np.ndarray]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> np.ndarray:
        sample = self.samples[i]
        row = np.empty((5, len(sample["text"])), np.int64)
        row[TOKEN] = sample["text"]
        row[TYPE] = sample["types"]
        row[LABEL] = np.where(sample["loss_mask"] == 1, sample["labels"], IGNORED)
        row[REAL] = sample["padding_mask"]
        row[ORDER] = sample["is_random"]
        return row

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset of sample `i`."""
        return self.samples.dataset_prefix(i)
