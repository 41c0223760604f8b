"""Evaluate TEXT2TEXT after every epoch: loss of the targets, and greedy decoding compared with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from mega_schema.tasks.text_pairs import TextPair, is_exact_match, token_f1
from mega_train.data.dataloaders import SampleReader
from mega_train.data.task_data import TaskReader
from mega_train.data.text2text import EncodedPairs
from mega_train.engine.greedy_decoding import decode_greedily
from mega_train.engine.task_validation import TaskValidator


class Text2TextValidator(TaskValidator):
    """Evaluates all pairs of every --valid-data file."""

    @torch.no_grad()
    def _evaluate(self, name: str, reader: SampleReader) -> dict[str, float]:
        assert isinstance(reader, TaskReader)
        assert isinstance(reader.samples, EncodedPairs)
        start_time = self._clock()
        predictions = [
            text for first in range(0, len(reader), reader.batch) for text in self._decode(reader, first)
        ]
        pairs = cast(Sequence[TextPair], reader.examples)
        self._write_predictions(name, _prediction_rows(pairs, predictions))
        if pairs[0].target is None:
            self._report_no_labels(name)
            return {}
        # of a target, the words that its tokens stand for: a tokenizer may lower their case
        tokenizer = reader.samples.tokenizer
        target_ids = tokenizer.encode_batch([pair.target or "" for pair in pairs])
        targets = [tokenizer.decode(ids) for ids in target_ids]
        scores = [
            (is_exact_match(text, target), token_f1(text, target))
            for text, target in zip(predictions, targets, strict=True)
        ]
        exact_match, f1 = np.mean(scores, axis=0).tolist()
        metrics = {"exact_match": exact_match, "token_f1": f1}
        self._report(name, self._loss(reader, reader.samples), metrics, start_time)
        return metrics

    def _decode(self, reader: TaskReader, first: int) -> list[str]:
        """Decode a batch of samples; its targets are the first guess."""
        assert isinstance(reader.samples, EncodedPairs)
        samples = reader.samples
        count = min(reader.batch, len(reader.examples) - first)
        guess_BL = np.full((reader.batch, samples.decoder_length), samples.special.end, np.int64)
        for i in range(count):
            target = samples.target(first + i)
            guess_BL[i, : len(target)] = target
        outputs = decode_greedily(
            partial(self._trainer.forward_backward.next_tokens, reader, first),
            guess_BL,
            start=samples.special.start,
            end=samples.special.end,
            width=max(8, int(samples.target_counts[first : first + count].max())),
        )
        return [samples.tokenizer.decode(ids) for ids in outputs[:count]]

    def _loss(self, reader: TaskReader, samples: EncodedPairs) -> float:
        """Return the mean loss of the file's target tokens."""
        total = 0.0
        length = self._trainer.config.seq_length
        for first in range(0, len(reader), reader.batch):
            losses = self._trainer.forward_backward.mean_losses(
                reader, first, reader.batch, length, train=False
            )
            total += float(losses.total) * int(samples.target_counts[first : first + reader.batch].sum())
        return total / int(samples.target_counts.sum())


def _prediction_rows(pairs: Sequence[TextPair], predictions: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Yield the contents of a line of a file of predictions."""
    for pair, text in zip(pairs, predictions, strict=True):
        yield {"id": pair.id, "input": pair.input, "target": pair.target, "prediction": text}
