"""The examples of a task, and the samples that they become.

An epoch reads every training example once, in an order of its own that the seed and the epoch's number
determine. It has whole batches: the last examples are left out, or samples without a label complete them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from mega_schema.errors import ConfigError, FormatError
from mega_schema.task_heads import SPAN_LABELS
from mega_schema.tasks.pair_features import EncodedExamples, SpecialIds
from mega_schema.tasks.pair_tasks import TEXT2TEXT, PairFiles, check_labels, choose_labels
from mega_schema.tasks.race_examples import LabelledExample
from mega_schema.tasks.span_features import SpanWindows
from mega_schema.tasks.squad_examples import SpanExample, read_squad
from mega_schema.tasks.tag_examples import TagExample, check_tags, choose_tags, read_tags
from mega_schema.tasks.tag_features import EncodedTags
from mega_schema.tasks.text_pairs import TextPair, read_text_pairs
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder
from mega_train.config.task import TaskConfig
from mega_train.data.encoder.vocabulary import BERT_HINT
from mega_train.data.text2text import EncodedPairs, SequenceIds

log = logging.getLogger("mega.train")

TaskExample = LabelledExample | SpanExample | TagExample | TextPair
T5_HINT = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"


@dataclass(frozen=True, slots=True)
class TaskData:
    """The examples of a run's task.

    Attributes:
        config: the options, with the classes of the task.
        training: examples of all --train-data files.
        validation: examples of each --valid-data file, by its name without the suffix.
        windows: the training samples of SQUAD, which are more than examples.
    """

    config: TaskConfig
    training: Sequence[TaskExample]
    validation: Mapping[str, Sequence[TaskExample]]
    windows: SpanWindows | None = None
    identity: None = None
    tokenizer: None = None

    @classmethod
    def open(cls, config: TaskConfig) -> Self:
        """Read the files of the task.

        Raises:
            ConfigError: files are not named, or two have the same name.
            FormatError: a file is not one of the task, or a label is unknown.
        """
        assert config.name is not None
        trains = config.epochs != 0
        if trains and not config.train:
            raise ConfigError("--train-data", "missing", wanted="files of training examples")
        if not 0 <= len(config.text_keys) <= 2:
            raise ConfigError(
                "--text-keys", "are too many", found=" ".join(config.text_keys), wanted="1 or 2"
            )
        train_files = [Path(path) for path in config.train] if trains else []
        valid_files = dict[str, Path]()
        for path in map(Path, config.valid):
            if (name := path.name.partition(".")[0]) in valid_files:
                raise ConfigError("--valid-data", "two files have the same name", found=name)
            valid_files[name] = path
        if config.name == TEXT2TEXT:
            return cls(config, *_read_text_pairs(config, train_files, valid_files))
        if config.name == "SQUAD":
            return cls(replace(config, labels=SPAN_LABELS), *_read_questions(train_files, valid_files))
        if config.name == "TAG":
            return cls(*_read_sentences(config, train_files, valid_files))
        files = PairFiles(config.name, config.text_keys or ("text",), config.label_key)
        training = [example for path in train_files for example in _read(files, path)]
        validation = {name: _read(files, path) for name, path in valid_files.items()}
        labelled = training or [example for examples in validation.values() for example in examples]
        labels = choose_labels(config.name, config.labels, labelled)
        check_labels(training, labels, required=True)
        for examples in validation.values():
            check_labels(examples, labels, required=False)
        return cls(replace(config, labels=labels), training, validation)

    def encode_windows(self, tokenizer: Path | Tokenizer | None, length: int | None) -> Self:
        """Return the data with the training samples of SQUAD: their number determines that of the steps.

        Args:
            length: tokens of a sample; None if it is not known.

        Raises:
            ConfigError: there is no tokenizer of BERT, or options do not fit the length.
        """
        questions = [example for example in self.training if isinstance(example, SpanExample)]
        if not questions:
            return self
        if length is None:
            wanted = "tokens of a question with a window of its passage"
            raise ConfigError("--seq-length", "missing", wanted=wanted, hint="--seq-length 384")
        opened = _open_tokenizer(self.config, tokenizer)
        special = SpecialIds.from_tokenizer(opened)
        return replace(self, windows=SpanWindows(questions, opened, special, length, self.config.spans))

    @property
    def training_samples(self) -> int:
        """Number of training samples."""
        return len(self.training) if self.windows is None else len(self.windows)

    @property
    def balanced_weights(self) -> tuple[float, ...]:
        """Weights of the classes that give each the same share of the loss; their mean over examples is 1.

        Raises:
            ConfigError: a class has no example.
        """
        counts = dict.fromkeys(self.config.labels, 0)
        for example in self.training:
            assert not isinstance(example, TextPair | SpanExample | TagExample), (
                "resolve refuses --class-weights"
            )
            assert example.label is not None
            counts[example.label] += 1
        if absent := [label for label, count in counts.items() if not count]:
            raise ConfigError("--class-weights", "a class has no training example", found=absent[0])
        return tuple(len(self.training) / (len(counts) * count) for count in counts.values())


class EncodedSamples(Protocol):
    """The samples of the examples of one kind."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray: ...

    def filler(self) -> np.ndarray:
        """Return a sample without a loss, which completes a batch."""


class TaskReader:
    """Random access to the samples of a split, as `pair_features` or `text2text` makes them.

    Attributes:
        samples: of every example.
        examples: the source of the samples.
        batch: samples of a step; the number of samples is a multiple of it.
    """

    def __init__(
        self,
        samples: EncodedSamples,
        examples: Sequence[TaskExample],
        path: Path,
        batch: int,
        length: int,
    ) -> None:
        self.examples = examples
        self.batch = batch
        self.length = length
        self.samples = samples
        self._path = path
        self._filler = samples.filler()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> np.ndarray:
        number = self._example_number(i)
        sample: np.ndarray = self._filler if number is None else self.samples[number]
        return sample

    def _example_number(self, i: int) -> int | None:
        """Return the example of sample `i`; None for a sample that completes a batch."""
        return i if i < len(self.samples) else None

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Do nothing: the samples are in memory."""

    def dataset_prefix(self, i: int) -> Path:
        """Return the file of the samples."""
        return self._path


class EpochReader(TaskReader):
    """The samples of training: the examples of every epoch, in its own order."""

    def __init__(
        self,
        samples: EncodedSamples,
        examples: Sequence[TaskExample],
        path: Path,
        batch: int,
        *,
        epochs: int,
        seed: int,
        keeps_last: bool,
    ) -> None:
        self.epoch_samples = len(samples) // batch * batch
        if keeps_last:
            self.epoch_samples = -(-len(samples) // batch) * batch
        super().__init__(samples, examples, path, batch, self.epoch_samples * epochs)
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def _example_number(self, i: int) -> int | None:
        epoch, position = divmod(i, self.epoch_samples)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self.samples))
            self._order = epoch, order
        return int(self._order[1][position]) if position < len(self.samples) else None


@dataclass(frozen=True, slots=True)
class TaskSamples:
    """The samples of a run's task.

    Attributes:
        validation: by the name of their file.
    """

    data: TaskData
    training: TaskReader
    validation: Mapping[str, TaskReader]

    @classmethod
    def from_tokenizer(
        cls,
        data: TaskData,
        tokenizer: Path | Tokenizer | None,
        length: int,
        decoder_length: int,
        batch: int,
        seed: int,
    ) -> Self:
        """Encode the examples.

        Args:
            length: tokens of a sample.
            decoder_length: tokens of a sample of the decoder, in TEXT2TEXT.
            batch: samples of a step.

        Raises:
            ConfigError: there is no tokenizer, or it is not one of the model.
        """
        config = data.config
        encode = _encoder(config, _open_tokenizer(config, tokenizer), length, decoder_length)
        validation = dict[str, TaskReader]()
        for (name, examples), path in zip(data.validation.items(), config.valid, strict=True):
            samples = encode(examples)
            whole_batches = -(-len(samples) // batch) * batch
            validation[name] = TaskReader(samples, examples, Path(path), batch, whole_batches)
        if not data.training:  # only evaluated
            return cls(data, next(iter(validation.values())), validation)
        training = EpochReader(
            data.windows or encode(data.training),
            data.training,
            Path(config.train[0]),
            batch,
            epochs=config.epochs or 0,
            seed=seed,
            keeps_last=config.keep_last_batch,
        )
        return cls(data, training, validation)


def _open_tokenizer(config: TaskConfig, tokenizer: Path | Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        hint = T5_HINT if config.name == TEXT2TEXT else BERT_HINT
        what = "missing, and the checkpoint records no tokenizer"
        raise ConfigError("--tokenizer-type", what, wanted="the model's tokenizer", hint=hint)
    return open_tokenizer_folder(tokenizer) if isinstance(tokenizer, Path) else tokenizer


def _encoder(
    config: TaskConfig, tokenizer: Tokenizer, length: int, decoder_length: int
) -> Callable[[Sequence[Any]], EncodedSamples]:  # Any: examples of the task
    """Return the function that makes the samples of examples of the task."""
    if config.name == TEXT2TEXT:
        ids = SequenceIds.from_tokenizer(tokenizer)
        return lambda pairs: EncodedPairs(pairs, tokenizer, ids, length, decoder_length)
    special = SpecialIds.from_tokenizer(tokenizer)
    if config.name == "SQUAD":
        return lambda questions: SpanWindows(questions, tokenizer, special, length, config.spans)
    if config.name == "TAG":
        return lambda sentences: _encode_sentences(sentences, tokenizer, special, length, config.labels)
    return lambda examples: EncodedExamples(examples, tokenizer, special, length, config.labels)


def _read_text_pairs(
    config: TaskConfig, train_files: Sequence[Path], valid_files: Mapping[str, Path]
) -> tuple[list[TextPair], dict[str, list[TextPair]]]:
    """Read the pairs of training, all of which need targets, and those of each file to evaluate.

    Raises:
        FormatError: a file has no pairs.
    """
    keys = config.input_key, config.target_key
    training = [pair for path in train_files for pair in read_text_pairs(path, *keys)]
    for pair in training:
        if pair.target is None:
            hint = "--target-key KEY"
            raise FormatError(pair.where, f"no text under {config.target_key!r}", hint=hint)
    return training, {name: read_text_pairs(path, *keys) for name, path in valid_files.items()}


def _read_questions(
    train_files: Sequence[Path], valid_files: Mapping[str, Path]
) -> tuple[list[SpanExample], dict[str, list[SpanExample]]]:
    """Read the questions of training, all of which need answers, and those of each file to evaluate.

    Raises:
        FormatError: a file is not in the layout of SQuAD.
    """
    training = [example for path in train_files for example in read_squad(path)]
    for example in training:
        if example.answers is None:
            raise FormatError(example.where, "has no answers", wanted="answers to learn")
    return training, {name: read_squad(path) for name, path in valid_files.items()}


def _read_sentences(
    config: TaskConfig, train_files: Sequence[Path], valid_files: Mapping[str, Path]
) -> tuple[TaskConfig, list[TagExample], dict[str, list[TagExample]]]:
    """Read the sentences; return the options with the tags, the sentences of training and of each other file.

    Raises:
        ConfigError: there are fewer than two tags.
        FormatError: a file has no sentences with tags, or a tag is unknown.
    """
    training = [example for path in train_files for example in read_tags(path)]
    validation = {name: read_tags(path) for name, path in valid_files.items()}
    tags = choose_tags(config.labels, training or [e for examples in validation.values() for e in examples])
    check_tags(training, tags, required=True)
    for examples in validation.values():
        check_tags(examples, tags, required=False)
    return replace(config, labels=tags), training, validation


def _encode_sentences(
    sentences: Sequence[TagExample],
    tokenizer: Tokenizer,
    special: SpecialIds,
    length: int,
    tags: Sequence[str],
) -> EncodedTags:
    samples = EncodedTags(sentences, tokenizer, special, length, tags)
    if samples.words_cut:
        log.warning("%d words are beyond --seq-length %d and left out", samples.words_cut, length)
    return samples


def _read(files: PairFiles, path: Path) -> Sequence[LabelledExample]:
    examples, skipped = files.read(path)
    if skipped:
        log.warning("%s: %d rows without the columns of %s are left out", path, skipped, files.task)
    return examples
