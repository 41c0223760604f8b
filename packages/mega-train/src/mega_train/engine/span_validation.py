"""Evaluate SQUAD after every epoch: exact match and F1 of the answers, and predictions."""

from __future__ import annotations

import json

import torch

from mega_schema.atomic_io import write_text
from mega_schema.task_heads import SPAN_LABELS
from mega_schema.tasks.span_features import SpanWindows
from mega_schema.tasks.span_predictions import SpanPredictions
from mega_schema.tasks.squad_examples import has_unanswerable
from mega_train.data.dataloaders import SampleReader
from mega_train.data.task_data import TaskReader
from mega_train.engine.task_validation import PREDICTIONS, TaskValidator


class SpanValidator(TaskValidator):
    """Evaluates all questions of every --valid-data file."""

    @torch.no_grad()
    def _evaluate(self, name: str, reader: SampleReader) -> dict[str, float]:
        assert isinstance(reader, TaskReader)
        assert isinstance(reader.samples, SpanWindows)
        start_time = self._clock()
        windows = reader.samples
        logits_WL2 = self._compute_logits(reader).reshape(len(windows), windows.length, len(SPAN_LABELS))
        options = self._trainer.config.run.task.spans
        allows_null = has_unanswerable(windows.examples)
        predictions = SpanPredictions(windows, logits_WL2, options, allows_null=allows_null)
        metrics = self._report_predictions(name, predictions, predictions.metrics, start_time)
        self._write_official(name, predictions)
        return metrics

    def _write_official(self, name: str, predictions: SpanPredictions) -> None:
        """Write the file that SQuAD's evaluation scripts read, if the run saves."""
        save = self._trainer.config.run.checkpoint.save
        if save is None or self._trainer.mesh.rank:
            return
        ids = [example.id for example in predictions.examples]
        texts = json.dumps(dict(zip(ids, predictions.texts, strict=True)), ensure_ascii=False)
        iteration = self._trainer.state.iteration
        write_text(save / PREDICTIONS / f"{name}-{iteration:07}.predictions.json", texts + "\n")
