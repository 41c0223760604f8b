"""Forward step of a micro-batch of questions about passages: logits of begin and end, and losses."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.dropout import DropoutFn, no_dropout
from mega_schema.task_heads import SPAN_LABELS
from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL
from mega_train.engine.task_forward_step import TaskForwardStep


class SpanForwardStep(TaskForwardStep):
    """The micro-batches of a step of SQUAD; batches are (samples, 4, length) of `span_features`.

    A sample's loss is the mean of the cross-entropies of begin and end over its tokens. Padding has no
    probability: the loss does not depend on the length that samples are padded to.
    """

    def _head_tokens(self, rows: int) -> Tensor:
        return torch.arange(rows * self.seq_length, device=self.mesh.device)

    def _head_dropout(self, micro: int, rows: int) -> DropoutFn:
        return no_dropout  # BERT's head of spans has none

    def _sum_losses(self, logits_BK: Tensor, values: Tensor) -> Tensor:
        outputs = len(SPAN_LABELS)
        logits_BLO = logits_BK.reshape(len(values), -1, outputs)
        logits_BLO = logits_BLO.masked_fill(values[:, REAL, :, None] == 0, -torch.inf)
        label_BO = values[:, LABEL, :outputs]
        return F.cross_entropy(logits_BLO, label_BO, ignore_index=IGNORED, reduction="sum") / outputs

    def _label_weights(self, batch: np.ndarray) -> Tensor:
        return torch.from_numpy((batch[:, LABEL, 0] != IGNORED).astype(np.float32))
