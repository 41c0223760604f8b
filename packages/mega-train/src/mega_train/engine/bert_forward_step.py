"""Forward step of a micro-batch of BERT: masked tokens and the order of segments."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mega_model.dropout import no_dropout
from mega_model.loss import IGNORED
from mega_train.data.encoder.bert_reader import LABEL, ORDER, REAL, TOKEN, TYPE
from mega_train.engine.encoder_attention import encoder_attention, unpadded_attention
from mega_train.engine.forward_step import ForwardStep
from mega_train.engine.unpadded_rows import UnpaddedRows
from mega_train.optim.loss_scaler import scale_loss


class BertForwardStep(ForwardStep):
    """The micro-batches of one optimizer step of BERT; batches are (samples, 5, length) of `bert_reader`.

    A micro-batch's loss is the mean over its masked tokens, plus with a binary head the mean over its
    samples. The step's loss is the mean over its micro-batches, as in Megatron. With --unpad-samples the
    model computes the tokens of the samples end to end, and no padding.
    """

    def length_of(self, batch: np.ndarray) -> int:
        return int(batch.shape[-1])

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        batch = self.batches[micro]
        device, recompute = self.mesh.device, self.config.recompute
        values = torch.from_numpy(batch).to(device, non_blocking=True)
        values_VT = values.transpose(0, 1).flatten(1)
        position_T = self.position_s.repeat(len(batch))
        dropout = self._dropout(micro)
        first_B = None
        if self._unpadded_rows is None:
            attend = encoder_attention(model.kernels, recompute, batch[:, REAL], dropout, device)
        else:
            rows = self._unpadded_rows[micro]
            index_T, first_B = (torch.from_numpy(x).to(device) for x in (rows.index_T, rows.begin_B))
            values_VT, position_T = values_VT[:, index_T], position_T[index_T]
            dropout = dropout and replace(dropout, token_T=dropout.token_T[index_T])
            attend = unpadded_attention(model.kernels, recompute, rows.lengths, dropout, device)
        inputs = (
            values_VT[TOKEN] if received is None else received,
            position_T,
            attend,
            dropout or no_dropout,
        )
        types_T = values_VT[TYPE] if self.config.spec.token_types is not None else None
        if not model.stage.is_last:
            output: Tensor = model(*inputs, token_type_T=types_T)
            return output
        masked_M, count = self._find_masked(micro)
        target_T = values_VT[LABEL]
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
            first_B=first_B,
        )
        if order_B is None:
            return scale_loss(sums * (scale * shares[0]), self.loss_scale)
        terms = sums * torch.tensor(shares, device=sums.device) * scale
        self.terms.append(terms.detach())
        return scale_loss(terms.sum(), self.loss_scale)

    @cached_property
    def _unpadded_rows(self) -> list[UnpaddedRows] | None:
        """The rows of each micro-batch without padding; None if padding is computed."""
        if not self.config.run.encoder_data.unpad:
            return None
        tp = self.mesh.tp
        multiple = tp.size if tp.sequence or self.config.recompute.distribute_saved else 1
        return [UnpaddedRows.from_real(batch[:, REAL], multiple) for batch in self.batches]

    def boundary(self, micro: int) -> tuple[int, int]:
        if self._unpadded_rows is None:
            return super().boundary(micro)
        tp = self.mesh.tp
        tokens = len(self._unpadded_rows[micro].index_T)
        return tokens // tp.size if tp.sequence else tokens, self.config.spec.hidden

    def _find_masked(self, micro: int) -> tuple[Tensor | None, int]:
        """Find the masked tokens of a micro-batch, at least one, and their number.

        With sequence parallelism there is no index: ranks hold different numbers of masked tokens, and the
        head computes all.
        """
        label_T = self.batches[micro][:, LABEL].reshape(-1)
        if self._unpadded_rows is not None:
            label_T = label_T[self._unpadded_rows[micro].index_T]
        (masked,) = np.nonzero(label_T != IGNORED)
        count = max(1, len(masked))  # short samples may have no masked token: then the first is ignored
        if self.mesh.tp.sequence:
            return None, count
        index = masked if len(masked) else np.zeros(1, np.int64)
        return torch.from_numpy(index).to(self.mesh.device), count
