"""Forward step of a micro-batch of pairs of texts, for T5: the loss of the targets, or predicted tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.loss import IGNORED
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE_REAL, TOKEN
from mega_train.engine.t5_forward_step import T5ForwardStep

_LENGTH_MULTIPLE = 8  # of lengths, so that few different shapes occur


class Text2TextForwardStep(T5ForwardStep):
    """The micro-batches of a step of pairs of texts; batches are (samples, 5, length) of `text2text`.

    The loss is the mean over the target tokens of the step on all replicas. Layout and micro-batch size do
    not change it. Both sides are as long as the longest texts of this rank's micro-batches.

    Attributes:
        predicts: whether to predict tokens instead of computing the loss.
        outputs: the numbers and the most probable next tokens (B, length) of each micro-batch's samples, on
            the rank of the last stage.
        evaluated_numbers: the numbers of the samples of each micro-batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.predicts = False
        self.outputs = list[tuple[Sequence[int], Tensor]]()
        self.evaluated_numbers: Sequence[Sequence[int]] = ()
        count = sum(int((batch[:, LABEL] != IGNORED).sum()) for batch in self.batches)
        total = self.mesh.dp.reduce(torch.tensor(float(count), device=self.mesh.device))
        # the mean over the replicas cancels the division; a batch without targets has the loss 0
        self.weight = self.mesh.dp.size / total.clamp(min=1)

    @cached_property
    def encoder_length(self) -> int:
        return self._longest(SOURCE_REAL, self.config.seq_length)

    def length_of(self, batch: np.ndarray) -> int:
        return self._longest(REAL, self.config.run.encoder_data.decoder_length)

    def _longest(self, row: int, limit: int) -> int:
        """Return the tokens of the longest text, rounded up to what the ranks of tp can share."""
        longest = max(int((batch[:, row] != 0).sum(1).max()) for batch in self.batches)
        multiple = math.lcm(_LENGTH_MULTIPLE, self.mesh.tp.size)
        return min(-(-longest // multiple) * multiple, limit)

    def _token_weight(self, count: int) -> float | Tensor:
        return self.weight

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        if not self.predicts:
            return super().forward(chunk, micro, received)
        output = self._run_model(chunk, micro, received)
        if not self.models[chunk].stage.is_last:
            return output
        token_T = most_probable(output.float(), self.config.spec.vocab, self.mesh.tp)
        numbers = self.evaluated_numbers[micro]
        self.outputs.append((numbers, token_T.unflatten(0, (len(numbers), -1))))
        return output.new_zeros(())


def most_probable(logits_TV: Tensor, vocab: int, tp: Axis) -> Tensor:
    """Return the most probable id of every token, (T,); of equal ones the first.

    Args:
        logits_TV: this rank's slice of the vocabulary, padding rows included.
        vocab: size of the whole vocabulary without padding.
    """
    first = tp.rank * logits_TV.shape[1]
    logits_TV[:, max(0, vocab - first) :] = -torch.inf
    local_T, index_T = logits_TV.max(-1)
    best_T = tp.reduce(local_T.clone(), "max")
    return tp.reduce(torch.where(local_T == best_T, first + index_T, vocab), "min")


def put_decoder_input(batch: np.ndarray, token_BW: np.ndarray) -> None:
    """Replace the decoder's text of samples by an input without a loss."""
    width = token_BW.shape[1]
    batch[:, LABEL] = IGNORED
    batch[:, TOKEN, :width] = token_BW
    batch[:, REAL] = 0
    batch[:, REAL, :width] = 1
