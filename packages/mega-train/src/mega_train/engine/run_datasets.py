"""Open the datasets of a run, and add the vocabulary by which an encoder's samples are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mega_schema.errors import ConfigError
from mega_schema.presets import preset
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_train.config import RunConfig
from mega_train.data.dataloaders import RunDatasets
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.data.sft import SftExamples, open_examples
from mega_train.data.span_corruption import SpanVocabulary
from mega_train.data.task_data import TaskData, TaskSamples
from mega_train.resolve import ResolvedConfig


def open_datasets(
    run: RunConfig, flag_tokenizer: Tokenizer | None, loaded_spec: ModelSpec | None
) -> Datasets | SftExamples | TaskData:
    """Open the datasets of the run.

    Args:
        flag_tokenizer: the tokenizer of the flags.
        loaded_spec: the model of the checkpoint.

    Raises:
        MegaError: a dataset cannot be opened, or mock data has no vocabulary size.
    """
    if run.task.name is not None:
        return TaskData.open(run.task)
    if not run.data.mock:
        return open_examples(run.data) if run.data.sft else Datasets.open(run.data)
    if run.data.sft:
        raise ConfigError("--mock-data", "has no prompts and answers", found="--sft", hint="leave it out")
    model = run.model
    vocab = flag_tokenizer.identity.vocab_size if flag_tokenizer else model.vocab
    if vocab is None:
        spec = preset(model.preset) if model.preset else loaded_spec
        vocab = spec.vocab if spec else None
    if vocab is None:
        wanted = "ids for the mock data"
        raise ConfigError("--vocab-size", "missing", wanted=wanted, hint="--vocab-size 50257")
    eod = flag_tokenizer.identity.eod if flag_tokenizer else None
    return Datasets.mock(vocab, vocab - 1 if eod is None else eod, run.data)


def add_vocabulary(
    datasets: Datasets | SftExamples | TaskData, tokenizer: Path | Tokenizer | None, config: ResolvedConfig
) -> RunDatasets:
    """Return the datasets, for encoders, span corruption and tasks with the special tokens of their samples.

    Raises:
        MegaError: the tokenizer is not known, or has no mask token or too few sentinels.
    """
    if config.span_rule is not None:
        assert isinstance(datasets, Datasets), "resolve refuses --sft"
        vocabulary = SpanVocabulary.from_tokenizer(tokenizer)
        config.span_rule.check_sentinels(vocabulary)
        return replace(datasets, span_vocabulary=vocabulary)
    if isinstance(datasets, TaskData):
        lengths = config.seq_length, config.run.encoder_data.decoder_length
        batch, seed = config.global_batch_size, config.run.train.seed
        return TaskSamples.from_tokenizer(datasets, tokenizer, *lengths, batch, seed)
    if config.spec.is_decoder_only:
        return datasets
    assert isinstance(datasets, Datasets), "resolve refuses --sft"
    return SentenceDatasets.from_tokenizer(config.spec.family, datasets, tokenizer, config.run.encoder_data)
