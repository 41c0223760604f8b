"""The tasks of fine-tuning: which files they read, which classes they have, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import Family
from mega_schema.task_heads import TaskHead
from mega_schema.tasks.labelled_files import read_labelled
from mega_schema.tasks.pair_examples import MNLI_LABELS, QQP_LABELS, read_mnli, read_qqp
from mega_schema.tasks.race_examples import RACE_LABELS, LabelledExample, read_race

ClassTaskName = Literal["MNLI", "QQP", "RACE", "CLASSIFY"]
TaskName = Literal["MNLI", "QQP", "RACE", "CLASSIFY", "SQUAD", "TAG", "TEXT2TEXT"]
TEXT2TEXT: Final = "TEXT2TEXT"  # of T5: it has no head, and reads `text_pairs`


def head_of_task(task: TaskName) -> TaskHead:
    """Return the head of the task."""
    if task == TEXT2TEXT:
        return "none"
    if task == "SQUAD":
        return "span"
    if task == "TAG":
        return "token_classification"
    return "multiple_choice" if task == "RACE" else "classification"


def family_of_task(task: TaskName) -> Family:
    """Return the family of the models that are fine-tuned on the task."""
    return "t5" if task == TEXT2TEXT else "bert"


def f1_name(*, binary: bool) -> str:
    """Return the name of the F1 of a classification: of class 1, or the mean over the classes."""
    return "f1" if binary else "macro_f1"


def metrics_of_task(task: TaskName) -> tuple[str, ...]:
    """Return the metrics that can choose the best epoch, the default first."""
    if task == TEXT2TEXT:
        return "exact_match", "token_f1"
    if task == "TAG":
        return "f1", "accuracy", "precision", "recall"
    return ("f1", "exact_match") if task == "SQUAD" else ("accuracy", f1_name(binary=task == "QQP"))


@dataclass(frozen=True, slots=True)
class PairFiles:
    """How the files of a task are read.

    Attributes:
        text_keys, label_key: keys of the records of CLASSIFY.
    """

    task: ClassTaskName
    text_keys: Sequence[str] = ("text",)
    label_key: str = "label"

    def read(self, path: Path) -> tuple[Sequence[LabelledExample], int]:
        """Read a file: its examples, and the number of rows that were left out.

        Raises:
            FormatError: it is not a file of the task.
        """
        if self.task == "MNLI":
            return read_mnli(path), 0
        if self.task == "QQP":
            return read_qqp(path)
        if self.task == "RACE":
            return read_race(path), 0
        return read_labelled(path, self.text_keys, self.label_key), 0


def choose_labels(
    task: ClassTaskName, names: Sequence[str], examples: Sequence[LabelledExample]
) -> tuple[str, ...]:
    """Return the classes in the order of the head's outputs: the task's, those given, or those of the data.

    Args:
        names: of --labels; empty if not given.
        examples: of training, whose labels are the classes of CLASSIFY if none are given.

    Raises:
        ConfigError: other classes than the task's are given, or there are fewer than two.
    """
    fixed = {"MNLI": MNLI_LABELS, "QQP": QQP_LABELS, "RACE": RACE_LABELS}.get(task, ())
    if fixed and names and tuple(names) != fixed:
        raise ConfigError("--labels", f"{task} has its own", found=" ".join(names), hint="leave it out")
    labels = fixed or tuple(names)
    if not labels:
        labels = tuple(sorted({example.label for example in examples if example.label is not None}))
        if len(labels) < 2:
            found = " ".join(labels) or "none"
            raise ConfigError("--train-data", "has fewer than two classes", found=found, hint="--labels A B")
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ConfigError(
            "--labels", "are not two or more classes", found=" ".join(labels) or "none", wanted="their names"
        )
    return labels


def check_labels(examples: Sequence[LabelledExample], labels: Sequence[str], *, required: bool) -> None:
    """Check that every label is a class.

    Args:
        required: an example without a label is an error.

    Raises:
        FormatError: a label is unknown, or missing.
    """
    known = set(labels)
    for example in examples:
        if example.label is None:
            if required:
                raise FormatError(example.where, "has no label", wanted=" | ".join(labels))
        elif example.label not in known:
            wanted = " | ".join(labels)
            raise FormatError(example.where, "unknown label", found=example.label, wanted=wanted)
