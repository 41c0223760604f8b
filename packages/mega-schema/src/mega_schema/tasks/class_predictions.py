"""The predictions of a classifier for the examples of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mega_schema.tasks.class_metrics import class_metrics
from mega_schema.tasks.race_examples import LabelledExample


class ClassPredictions:
    """The predictions for the examples of a file.

    Attributes:
        labels: the classes, in the order of the logits.
        logits: (N, K).
    """

    def __init__(
        self, examples: Sequence[LabelledExample], labels: Sequence[str], logits: NDArray[np.floating]
    ) -> None:
        self.examples = examples
        self.labels = labels
        self.logits = logits.astype(np.float64)

    @property
    def has_labels(self) -> bool:
        """Whether the file has the right classes."""
        return self.examples[0].label is not None

    @cached_property
    def log_probabilities(self) -> NDArray[np.float64]:
        """ln P of every class, (N, K)."""
        shifted = self.logits - self.logits.max(1, keepdims=True)
        result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return result

    @cached_property
    def classes(self) -> NDArray[np.int64]:
        """Number of the most probable class of every example; of equal ones the first."""
        return np.asarray(self.logits.argmax(1), np.int64)

    @cached_property
    def label_numbers(self) -> NDArray[np.int64]:
        """Number of the right class of every example."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        return np.array([numbers[example.label or ""] for example in self.examples], np.int64)

    @property
    def loss(self) -> float:
        """Mean of -ln P of the right classes, without class weights."""
        return float(-self.log_probabilities[np.arange(len(self.examples)), self.label_numbers].mean())

    def metrics(self, *, binary: bool) -> dict[str, float]:
        """Return the metrics of `class_metrics`."""
        return class_metrics(self.label_numbers, self.classes, len(self.labels), binary=binary)

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield what a line of a file of predictions says: id, label, prediction and probabilities."""
        for example, number, logprobs in zip(
            self.examples, self.classes.tolist(), self.log_probabilities, strict=True
        ):
            probabilities = dict(zip(self.labels, np.exp(logprobs).round(6).tolist(), strict=True))
            yield {
                "id": example.id,
                "label": example.label,
                "prediction": self.labels[number],
                "probabilities": probabilities,
            }
