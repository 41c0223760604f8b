"""Add the special tokens that samples need to the datasets of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_train.data.dataloaders import RunDatasets
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.data.sft import SftExamples
from mega_train.data.span_corruption import SpanVocabulary
from mega_train.resolve import ResolvedConfig


def add_vocabulary(
    datasets: Datasets | SftExamples, tokenizer: Path | Tokenizer | None, config: ResolvedConfig
) -> RunDatasets:
    """Return the datasets, for BERT, T5 and span corruption with the special tokens of their samples.

    Raises:
        MegaError: the tokenizer is not known, or has no mask token or too few sentinels.
    """
    if config.span_rule is not None:
        assert isinstance(datasets, Datasets), "resolve refuses --sft"
        vocabulary = SpanVocabulary.from_tokenizer(tokenizer)
        config.span_rule.check_sentinels(vocabulary)
        return replace(datasets, span_vocabulary=vocabulary)
    if config.spec.is_decoder_only:
        return datasets
    assert isinstance(datasets, Datasets), "resolve refuses --sft"
    return SentenceDatasets.from_tokenizer(config.spec.family, datasets, tokenizer, config.run.encoder_data)
