"""Forward step of a micro-batch of BERT: masked tokens and the order of segments."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mega_model.dropout import no_dropout
from mega_model.loss import IGNORED
from mega_train.data.encoder.bert_reader import LABEL, ORDER, REAL, TOKEN, TYPE
from mega_train.engine.encoder_attention import encoder_attention
from mega_train.engine.forward_step import ForwardStep
from mega_train.optim.loss_scaler import scale_loss


class BertForwardStep(ForwardStep):
    """The micro-batches of one optimizer step of BERT; batches are (samples, 5, length) of `bert_reader`.

    A micro-batch's loss is the mean over its masked tokens, plus with a binary head the mean over its
    samples. The step's loss is the mean over its micro-batches, as in Megatron.
    """

    def length_of(self, batch: np.ndarray) -> int:
        return int(batch.shape[-1])

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        batch = self.batches[micro]
        values = torch.from_numpy(batch).to(self.mesh.device, non_blocking=True)
        dropout = self._dropout(micro)
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
        masked_M, count = self._find_masked(batch)
        target_T = values[:, LABEL].flatten()
        shares = 1 / count, 1 / len(batch)
        order_B = values[:, ORDER, 0] if self.config.spec.binary_head else None
        scale = 1 / len(self.batches)
        sums: Tensor = model(
            *inputs,
            target_T=target_T if masked_M is None else target_T[masked_M],
            gradient=self.loss_scale * scale * shares[0] if self.knows_loss_grad else None,
            token_type_T=types_T,
            masked_M=masked_M,
            order_B=order_B,
        )
        if order_B is None:
            return scale_loss(sums * (scale * shares[0]), self.loss_scale)
        terms = sums * torch.tensor(shares, device=sums.device) * scale
        self.terms.append(terms.detach())
        return scale_loss(terms.sum(), self.loss_scale)

    def _find_masked(self, batch: np.ndarray) -> tuple[Tensor | None, int]:
        """Find the masked tokens of a micro-batch, at least one, and their number.

        With sequence parallelism there is no index: ranks hold different numbers of masked tokens, and the
        head computes all.
        """
        (masked,) = np.nonzero(batch[:, LABEL].reshape(-1) != IGNORED)
        count = max(1, len(masked))  # short samples may have no masked token: then the first is ignored
        if self.mesh.tp.sequence:
            return None, count
        index = masked if len(masked) else np.zeros(1, np.int64)
        return torch.from_numpy(index).to(self.mesh.device), count
