"""One micro-batch on one stage: tokens to inputs, positions and targets; forward; mean loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mega_model.attend import Packed, documents
from mega_model.loss import IGNORED, token_loss
from mega_model.mesh import Axis
from mega_model.stage import Decoder
from mega_train.precision import scaled
from mega_train.resolve import Plan


class MicroBatches:
    """The micro-batches of one optimizer step, or of one batch of a validation (a `pipeline.Work`).

    A micro-batch's loss is the mean over its tokens that count, and the step's is the mean over its
    micro-batches (Megatron's).
    """

    def __init__(
        self,
        models: Sequence[Decoder],
        plan: Plan,
        tp: Axis,
        batches: Sequence[np.ndarray],
        scale: float,
    ) -> None:
        """
        Args:
            models: the stages this rank holds, by chunk.
            batches: per micro-batch (samples, length + 1) token ids.
            scale: how many times too large gradients are to be.
        """
        self.models, self.plan, self.tp, self.batches, self.scale = models, plan, tp, batches, scale

    @property
    def boundary(self) -> tuple[int, int]:
        tokens = self.plan.micro * self.plan.length
        return tokens // self.tp.size if self.tp.sequence else tokens, self.plan.spec.hidden

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        device = next(model.parameters()).device
        sample_BS1 = torch.from_numpy(self.batches[micro]).to(device, non_blocking=True)
        token_BS, target_BS = sample_BS1[:, :-1], sample_BS1[:, 1:]
        position_BS, attend = self._places(token_BS)
        x = token_BS.flatten() if received is None else received
        out = model(x, position_BS.flatten(), attend)
        if not model.stage.last:
            return out
        target_T = target_BS.flatten()
        if self.plan.run.data.eod_mask_loss:
            assert self.plan.eod is not None
            target_T = target_T.masked_fill(token_BS.flatten() == self.plan.eod, IGNORED)
        loss_T = token_loss(out, target_T, vocab=self.plan.spec.vocab, tp=self.tp)
        counted = (target_T != IGNORED).sum().clamp(min=1)
        return scaled(loss_T.sum() / counted / len(self.batches), self.scale)

    def _places(self, token_BS: Tensor) -> tuple[Tensor, Packed]:
        data, (rows, length) = self.plan.run.data, token_BS.shape
        whole = torch.arange(length, device=token_BS.device).expand(rows, length)
        if not (data.reset_positions or data.reset_attention):
            return whole, Packed(rows, length)
        assert self.plan.eod is not None
        document_BS, place_BS = documents(token_BS, self.plan.eod)
        attend = Packed(rows, length, document_BS if data.reset_attention else None)
        return place_BS if data.reset_positions else whole, attend
