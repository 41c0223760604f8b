"""Forward step of a micro-batch of a task: the logits of the head, and their cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, DropoutFn, no_dropout, token_keys
from mega_schema.task_heads import rows_per_sample
from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL, TOKEN, TYPE, split_rows
from mega_train.engine.encoder_attention import encoder_attention
from mega_train.engine.forward_step import ForwardStep
from mega_train.optim.loss_scaler import scale_loss


class TaskForwardStep(ForwardStep):
    """The micro-batches of a step of a task; batches are (samples, 4, rows x length) of `pair_features`.

    The loss is the mean over the samples of the step on all replicas, weighted by their classes. Layout and
    micro-batch size do not change it. Samples without a label have no loss.

    Attributes:
        outputs: in a validation, the numbers and logits (B, K) of each micro-batch's samples, on the rank of
            the last stage.
        evaluated_numbers: the numbers of the samples of each micro-batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs = list[tuple[Sequence[int], Tensor]]()
        self.evaluated_numbers: Sequence[Sequence[int]] = ()
        labels = self.config.spec.labels
        weights = [float(word) for word in self.config.run.task.class_weights] or [1.0] * len(labels)
        self.weight_K = torch.tensor(weights, device=self.mesh.device)
        total = sum((self._label_weights(batch).sum() for batch in self.batches), torch.zeros(()))
        # the mean over the replicas cancels the division; a batch without labels has the loss 0
        self.total_weight = (
            self.mesh.dp.reduce(total.to(self.mesh.device)).clamp(min=1e-12) / self.mesh.dp.size
        )

    def length_of(self, batch: np.ndarray) -> int:
        return int(batch.shape[-1]) // rows_per_sample(self.config.spec)

    def boundary(self, micro: int) -> tuple[int, int]:
        tokens, width = super().boundary(micro)
        return tokens * rows_per_sample(self.config.spec), width

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        samples = self.batches[micro]
        rows = rows_per_sample(self.config.spec)
        batch = split_rows(samples, rows)
        values = torch.from_numpy(batch).to(self.mesh.device, non_blocking=True)
        token_s = torch.arange(rows * self.seq_length, device=self.mesh.device)
        dropout = self._dropout(micro, token_s)
        inputs = (
            values[:, TOKEN].flatten() if received is None else received,
            self.position_s.repeat(len(batch)),
            encoder_attention(
                model.kernels, self.config.recompute, batch[:, REAL], dropout, self.mesh.device
            ),
            dropout or no_dropout,
        )
        types_T = values[:, TYPE].flatten() if self.config.spec.token_types is not None else None
        if not model.stage.is_last:
            output: Tensor = model(*inputs, token_type_T=types_T)
            return output
        head_token_N = self._head_tokens(len(batch))
        head_drop = self._head_dropout(micro, rows)
        logits_BK: Tensor = model(
            *inputs, token_type_T=types_T, head_token_N=head_token_N, head_drop=head_drop
        ).float()
        logits_BK = logits_BK.reshape(len(samples), -1)
        if self.sample_numbers is None:
            self.outputs.append((self.evaluated_numbers[micro], logits_BK.detach()))
        loss = self._sum_losses(logits_BK, values[::rows])
        return scale_loss(loss / self.total_weight, self.loss_scale)

    def _head_tokens(self, rows: int) -> Tensor:
        """Return the index of each token that the head reads on the whole token axis: of rows the first."""
        return torch.arange(rows, device=self.mesh.device) * self.seq_length

    def _sum_losses(self, logits_BK: Tensor, values: Tensor) -> Tensor:
        """Return the sum of the samples' losses, weighted by their classes.

        Args:
            values: (B, 4, length) the first row of each sample.
        """
        label_B = values[:, LABEL, 0]
        return F.cross_entropy(
            logits_BK, label_B, weight=self.weight_K, ignore_index=IGNORED, reduction="sum"
        )

    def _head_dropout(self, micro: int, rows: int) -> DropoutFn:
        """Return the dropout of the pooled first tokens, whole on every rank of tp."""
        train = self.config.run.train
        if self.sample_numbers is None or not train.hidden_dropout:
            return no_dropout
        row_r = torch.arange(rows, device=self.mesh.device)
        key_B = token_keys(train.seed, self.sample_numbers[micro], row_r)
        kernel = self.models[0].kernels.dropout_add
        return Dropout(train.hidden_dropout, 0.0, key_B, Axis("tp"), kernel)

    def _label_weights(self, batch: np.ndarray) -> Tensor:
        """Return the weight of each sample; 0 without a label."""
        label_B = torch.from_numpy(batch[:, LABEL, 0])
        return torch.where(label_B == IGNORED, 0.0, self.weight_K.cpu()[label_B.clamp(min=0)])
