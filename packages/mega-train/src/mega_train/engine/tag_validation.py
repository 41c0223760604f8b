"""Evaluate TAG after every epoch: accuracy of words, F1 of entities, and predictions."""

from __future__ import annotations

import torch

from mega_schema.tasks.tag_features import EncodedTags
from mega_schema.tasks.tag_predictions import TagPredictions
from mega_train.data.dataloaders import SampleReader
from mega_train.data.task_data import TaskReader
from mega_train.engine.task_validation import TaskValidator


class TagValidator(TaskValidator):
    """Evaluates the words of every --valid-data file."""

    @torch.no_grad()
    def _evaluate(self, name: str, reader: SampleReader) -> dict[str, float]:
        assert isinstance(reader, TaskReader)
        assert isinstance(reader.samples, EncodedTags)
        start_time = self._clock()
        samples, tags = reader.samples, self._trainer.config.spec.labels
        logits_NLK = self._compute_logits(reader).reshape(len(samples), samples.length, len(tags))
        predictions = TagPredictions(samples, logits_NLK, tags)
        return self._report_predictions(name, predictions, predictions.metrics, start_time)
