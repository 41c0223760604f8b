"""The datasets of a run of BERT or T5, with the vocabulary of their samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mega_schema.errors import ConfigError
from mega_schema.spec import Family
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder
from mega_train.config.encoder_data import EncoderDataConfig, EncoderFamily
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.vocabulary import BERT_HINT, MaskingVocabulary


@dataclass(frozen=True, slots=True)
class SentenceDatasets:
    """The datasets of a run of BERT or T5, and what determines how they become samples."""

    family: EncoderFamily
    datasets: Datasets
    vocabulary: MaskingVocabulary
    options: EncoderDataConfig

    @classmethod
    def from_tokenizer(
        cls,
        family: Family,
        datasets: Datasets,
        tokenizer: Path | Tokenizer | None,
        options: EncoderDataConfig,
    ) -> Self:
        """Look up the special tokens of the tokenizer of the datasets.

        Raises:
            ConfigError: there is no tokenizer, or it has no such tokens.
            FormatError: the tokenizer cannot be read.
        """
        assert family == "bert" or family == "t5", "other families need no vocabulary"
        if tokenizer is None:
            raise ConfigError(
                "--tokenizer-type",
                "missing, and no dataset records its tokenizer",
                wanted="the tokenizer of the data, whose words are masked",
                hint=BERT_HINT,
            )
        if isinstance(tokenizer, Path):
            tokenizer = open_tokenizer_folder(tokenizer)
        vocabulary = MaskingVocabulary.from_tokenizer(tokenizer)
        if family == "t5":
            vocabulary.check_sentinels()
        return cls(family, datasets, vocabulary, options)
