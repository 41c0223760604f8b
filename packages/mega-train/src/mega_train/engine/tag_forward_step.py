"""Forward step of a micro-batch of words with tags: the logits of every token, and the losses of words."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.dropout import DropoutFn
from mega_schema.tasks.pair_features import IGNORED, LABEL
from mega_train.engine.task_forward_step import TaskForwardStep


class TagForwardStep(TaskForwardStep):
    """The micro-batches of a step of TAG; batches are (samples, 4, length) of `tag_features`.

    The loss is the mean over the words of the step on all replicas.
    """

    def _head_tokens(self, rows: int) -> Tensor:
        return torch.arange(rows * self.seq_length, device=self.mesh.device)

    def _head_dropout(self, micro: int, rows: int) -> DropoutFn:
        return super()._head_dropout(micro, rows * self.seq_length)

    def _sum_losses(self, logits_BK: Tensor, values: Tensor) -> Tensor:
        label_T = values[:, LABEL].flatten()
        return F.cross_entropy(
            logits_BK.reshape(len(label_T), -1), label_T, ignore_index=IGNORED, reduction="sum"
        )

    def _label_weights(self, batch: np.ndarray) -> Tensor:
        return torch.from_numpy((batch[:, LABEL] != IGNORED).astype(np.float32))
