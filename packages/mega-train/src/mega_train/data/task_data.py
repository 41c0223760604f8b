"""The examples of a task, and the samples that they become.

An epoch reads every training example once, in an order of its own that the seed and the epoch's number
determine. It has whole batches: the last examples are left out, or samples without a label complete them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from mega_schema.errors import ConfigError
from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL, EncodedExamples, SpecialIds
from mega_schema.tasks.pair_tasks import PairFiles, check_labels, choose_labels
from mega_schema.tasks.race_examples import LabelledExample
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder
from mega_train.config.task import TaskConfig
from mega_train.data.encoder.vocabulary import BERT_HINT

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class TaskData:
    """The examples of a run's task.

    Attributes:
        config: the options, with the classes of the task.
        training: examples of all --train-data files.
        validation: examples of each --valid-data file, by its name without the suffix.
    """

    config: TaskConfig
    training: Sequence[LabelledExample]
    validation: Mapping[str, Sequence[LabelledExample]]
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
        files = PairFiles(config.name, config.text_keys or ("text",), config.label_key)
        training = [
            example for path in (config.train if trains else ()) for example in _read(files, Path(path))
        ]
        validation = dict[str, Sequence[LabelledExample]]()
        for path in map(Path, config.valid):
            if (name := path.name.partition(".")[0]) in validation:
                raise ConfigError("--valid-data", "two files have the same name", found=name)
            validation[name] = _read(files, path)
        labelled = training or [example for examples in validation.values() for example in examples]
        labels = choose_labels(config.name, config.labels, labelled)
        check_labels(training, labels, required=True)
        for examples in validation.values():
            check_labels(examples, labels, required=False)
        return cls(replace(config, labels=labels), training, validation)

    @property
    def balanced_weights(self) -> tuple[float, ...]:
        """Weights of the classes that give each the same share of the loss; their mean over examples is 1.

        Raises:
            ConfigError: a class has no example.
        """
        counts = dict.fromkeys(self.config.labels, 0)
        for example in self.training:
            assert example.label is not None
            counts[example.label] += 1
        if absent := [label for label, count in counts.items() if not count]:
            raise ConfigError("--class-weights", "a class has no training example", found=absent[0])
        return tuple(len(self.training) / (len(counts) * count) for count in counts.values())


class TaskReader:
    """Random access to the samples of a split: (4, rows x length) int64, as `pair_features` makes them.

    Attributes:
        examples: what the samples were made from.
        batch: samples of a step; the number of samples is a multiple of it.
    """

    def __init__(
        self,
        samples: EncodedExamples,
        examples: Sequence[LabelledExample],
        path: Path,
        batch: int,
        length: int,
    ) -> None:
        self.examples = examples
        self.batch = batch
        self.length = length
        self._samples = samples
        self._path = path
        self._filler = samples[0]
        self._filler[LABEL] = IGNORED
        self._filler[REAL] = 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> np.ndarray:
        number = self._example_number(i)
        sample: np.ndarray = self._filler if number is None else self._samples[number]
        return sample

    def _example_number(self, i: int) -> int | None:
        """Return the example of sample `i`; None for a sample that completes a batch."""
        return i if i < len(self.examples) else None

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Do nothing: the samples are in memory."""

    def dataset_prefix(self, i: int) -> Path:
        """Return the file of the samples."""
        return self._path


class EpochReader(TaskReader):
    """The samples of training: the examples of every epoch, in its own order."""

    def __init__(
        self,
        samples: EncodedExamples,
        examples: Sequence[LabelledExample],
        path: Path,
        batch: int,
        *,
        epochs: int,
        seed: int,
        keeps_last: bool,
    ) -> None:
        self.epoch_samples = len(examples) // batch * batch
        if keeps_last:
            self.epoch_samples = -(-len(examples) // batch) * batch
        super().__init__(samples, examples, path, batch, self.epoch_samples * epochs)
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def _example_number(self, i: int) -> int | None:
        epoch, position = divmod(i, self.epoch_samples)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self.examples))
            self._order = epoch, order
        return int(self._order[1][position]) if position < len(self.examples) else None


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
        cls, data: TaskData, tokenizer: Path | Tokenizer | None, length: int, batch: int, seed: int
    ) -> Self:
        """Encode the examples.

        Args:
            length: tokens of a sample.
            batch: samples of a step.

        Raises:
            ConfigError: there is no tokenizer, or it is not one of BERT.
        """
        if tokenizer is None:
            what = "missing, and the checkpoint records no tokenizer"
            raise ConfigError("--tokenizer-type", what, wanted="the model's tokenizer", hint=BERT_HINT)
        if isinstance(tokenizer, Path):
            tokenizer = open_tokenizer_folder(tokenizer)
        special = SpecialIds.from_tokenizer(tokenizer)
        config = data.config

        def encode(examples: Sequence[LabelledExample]) -> EncodedExamples:
            return EncodedExamples(examples, tokenizer, special, length, config.labels)

        validation = {
            name: TaskReader(
                encode(examples), examples, Path(path), batch, -(-len(examples) // batch) * batch
            )
            for (name, examples), path in zip(data.validation.items(), config.valid, strict=True)
        }
        if not data.training:  # only evaluated
            return cls(data, next(iter(validation.values())), validation)
        training = EpochReader(
            encode(data.training),
            data.training,
            Path(config.train[0]),
            batch,
            epochs=config.epochs or 0,
            seed=seed,
            keeps_last=config.keep_last_batch,
        )
        return cls(data, training, validation)


def _read(files: PairFiles, path: Path) -> Sequence[LabelledExample]:
    examples, skipped = files.read(path)
    if skipped:
        log.warning("%s: %d rows without the columns of %s are left out", path, skipped, files.task)
    return examples
