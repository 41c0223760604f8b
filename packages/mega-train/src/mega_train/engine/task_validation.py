"""Evaluate a task after every epoch: metrics, predictions, and the record of the best epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from mega_schema.atomic_io import atomic_write
from mega_schema.tasks.best_checkpoint import BestCheckpoint, read_best, write_best
from mega_schema.tasks.class_predictions import ClassPredictions
from mega_schema.tasks.pair_tasks import metrics_of_task
from mega_schema.tasks.race_examples import LabelledExample
from mega_train.config import TaskConfig
from mega_train.data.dataloaders import SampleReader
from mega_train.data.task_data import TaskReader
from mega_train.engine.validation import Validator
from mega_train.telemetry.events import Message, ValidationEnd

PREDICTIONS = "predictions"  # folder in --save


class Predictions(Protocol):
    """What a task predicts for the examples of a file."""

    @property
    def has_labels(self) -> bool: ...

    @property
    def loss(self) -> float: ...

    def rows(self) -> Iterator[dict[str, object]]: ...


class TaskValidator(Validator):
    """Evaluates all examples of every --valid-data file."""

    def validate(self, readers: Mapping[str, SampleReader]) -> None:
        """Evaluate the files, write their predictions, and record the epoch if it is the best."""
        metrics = [values for name, reader in readers.items() if (values := self._evaluate(name, reader))]
        trainer, save = self._trainer, self._trainer.config.run.checkpoint.save
        if metrics and save is not None and trainer.mesh.rank == 0:
            self._record_best(save, metrics[0])

    def validate_only(self) -> None:
        """Evaluate the files of a run that does not train."""
        for name, reader in self._trainer.valid.items():
            self._evaluate(name, reader)

    @torch.no_grad()
    def _evaluate(self, name: str, reader: SampleReader) -> dict[str, float]:
        """Evaluate a file; return its metrics, none without labels."""
        assert isinstance(reader, TaskReader)
        config = self._trainer.config
        start_time = self._clock()
        logits_NK = self._compute_logits(reader)
        examples = cast(Sequence[LabelledExample], reader.examples)
        predictions = ClassPredictions(examples, config.spec.labels, logits_NK)
        metrics = partial(predictions.metrics, binary=is_binary(config.run.task))
        return self._report_predictions(name, predictions, metrics, start_time)

    def _report_predictions(
        self, name: str, predictions: Predictions, metrics: Callable[[], dict[str, float]], start_time: float
    ) -> dict[str, float]:
        """Write the predictions of a file, and report its loss and metrics if it has labels.

        Args:
            metrics: called for a file with labels.

        Returns:
            The metrics, none without labels.
        """
        self._write_predictions(name, predictions.rows())
        if not predictions.has_labels:
            self._report_no_labels(name)
            return {}
        values = metrics()
        self._report(name, predictions.loss, values, start_time)
        return values

    def _compute_logits(self, reader: TaskReader) -> NDArray[np.float32]:
        """Return the logits of all samples, on every rank."""
        trainer = self._trainer
        logits = [
            trainer.forward_backward.task_logits(reader, first, reader.batch, trainer.config.seq_length)
            for first in range(0, len(reader), reader.batch)
        ]
        logits_NK: NDArray[np.float32] = torch.cat(logits)[: len(reader.samples)].cpu().numpy()
        return logits_NK

    def _write_predictions(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Write a line of JSON for every example of a file, whole or not at all, if the run saves."""
        save = self._trainer.config.run.checkpoint.save
        if save is None or self._trainer.mesh.rank:
            return
        folder = save / PREDICTIONS
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"{name}-{self._trainer.state.iteration:07}.jsonl") as partial:
            partial.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))

    def _report_no_labels(self, name: str) -> None:
        iteration = self._trainer.state.iteration
        self._observers.on_event(Message(f"{name} at iteration {iteration}: no labels"))

    def _report(self, name: str, loss: float, metrics: Mapping[str, float], start_time: float) -> None:
        state = self._trainer.state
        self._observers.on_event(
            ValidationEnd(
                split=name,
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                loss=loss,
                metrics=metrics,
                perplexity=None,
                seconds=self._clock() - start_time,
            )
        )

    def _record_best(self, save: Path, metrics: Mapping[str, float]) -> None:
        """Record the epoch if no earlier one of the run is better."""
        state = self._trainer.state
        task = self._trainer.config.run.task
        assert task.name is not None
        metric = task.best_metric or next(name for name in metrics_of_task(task.name) if name in metrics)
        best = read_best(save)
        epoch = state.iteration // self._trainer.config.run.evaluation.interval
        is_stale = best is not None and (epoch == 1 or best.iteration >= state.iteration)  # of an earlier run
        if best is None or is_stale or metrics[metric] > best.value:
            write_best(save, BestCheckpoint(state.iteration, epoch, metric, metrics[metric]))
            text = f"best epoch so far: {epoch} ({metric} {metrics[metric]:.4f})"
            self._observers.on_event(Message(text))


def is_binary(task: TaskConfig) -> bool:
    """Whether F1 is that of class 1, as for QQP."""
    return task.name == "QQP"
