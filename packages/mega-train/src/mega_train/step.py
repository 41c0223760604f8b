"""One micro-batch on one stage: tokens to inputs, positions and targets; forward; mean loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mega_model.attend import Attend, Packed, documents
from mega_model.context import places
from mega_model.dropout import Dropout, keep, token_keys
from mega_model.loss import IGNORED
from mega_model.mesh import Mesh
from mega_model.recompute import Recomputed
from mega_model.stage import Decoder
from mega_train.precision import scaled
from mega_train.resolve import Plan


class MicroBatches:
    """The micro-batches of one optimizer step, or of one batch of a validation (a `pipeline.Work`).

    A micro-batch's loss is the mean over its tokens that count, and the step's is the mean over its
    micro-batches (Megatron's). With context parallelism a rank computes the losses of its own tokens of every
    sample, times cp: then the mean over all replicas is the batch's, of losses and of gradients alike.
    """

    def __init__(
        self,
        models: Sequence[Decoder],
        plan: Plan,
        mesh: Mesh,
        batches: Sequence[np.ndarray],
        scale: float,
        samples: Sequence[Sequence[int]] | None,
    ) -> None:
        """
        Args:
            models: the stages this rank holds, by chunk.
            batches: per micro-batch (samples, length + 1) token ids, the same on every rank of cp.
            scale: how many times too large gradients are to be.
            samples: per micro-batch the numbers of its samples, which decide what dropout drops; None drops
                nothing, as in a validation.
        """
        self.models, self.plan, self.mesh, self.batches, self.scale = models, plan, mesh, batches, scale
        self.samples = samples
        self.length = batches[0].shape[1] - 1
        self.place_s = places(self.length, mesh.cp, device=mesh.device)

    @property
    def boundary(self) -> tuple[int, int]:
        tp, tokens = self.mesh.tp, self.plan.micro * self.length // self.mesh.cp.size
        return tokens // tp.size if tp.sequence else tokens, self.plan.spec.hidden

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        sample_BS1 = torch.from_numpy(self.batches[micro]).to(self.mesh.device, non_blocking=True)
        token_BS, target_BS = sample_BS1[:, :-1], sample_BS1[:, 1:]
        dropout = self._dropout(micro)
        position_BS, attend = self._seen(token_BS, dropout)
        x = self._own(token_BS) if received is None else received
        if self.plan.recompute.granularity == "selective":
            attend = Recomputed(attend)
        if self.plan.run.data.eod_mask_loss:
            assert self.plan.eod is not None
            target_BS = target_BS.masked_fill(token_BS == self.plan.eod, IGNORED)
        out = model(x, self._own(position_BS), attend, dropout or keep, self._own(target_BS))
        if not model.stage.last:
            return out
        counted = (target_BS != IGNORED).sum().clamp(min=1)
        return scaled(out * self.mesh.cp.size / counted / len(self.batches), self.scale)

    def _own(self, x_BS: Tensor) -> Tensor:
        """What belongs to this rank's tokens: (T,) of the whole rows'."""
        return x_BS[:, self.place_s].flatten()

    def _dropout(self, micro: int) -> Dropout | None:
        train = self.plan.run.train
        if self.samples is None or not (train.hidden_dropout or train.attention_dropout):
            return None
        key_T = token_keys(train.seed, self.samples[micro], self.place_s)
        return Dropout(train.hidden_dropout, train.attention_dropout, key_T, self.mesh.tp)

    def _seen(self, token_BS: Tensor, dropout: Dropout | None) -> tuple[Tensor, Attend]:
        """Every token's position, (B, S), and what it attends to."""
        data, (rows, length) = self.plan.run.data, token_BS.shape
        whole = torch.arange(length, device=token_BS.device).expand(rows, length)
        if not (data.reset_positions or data.reset_attention):
            return whole, Packed(rows, length, cp=self.mesh.cp, dropout=dropout)
        assert self.plan.eod is not None
        document_BS, place_BS = documents(token_BS, self.plan.eod)
        apart_BS = document_BS if data.reset_attention else None
        attend = Packed(rows, length, apart_BS, cp=self.mesh.cp, dropout=dropout)
        return place_BS if data.reset_positions else whole, attend
