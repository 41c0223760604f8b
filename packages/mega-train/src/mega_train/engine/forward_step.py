"""One micro-batch on one stage: tokens to inputs, positions and targets; forward; mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend, PackedAttention, document_positions
from mega_model.context_parallel import token_positions
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_model.dropout import Dropout, no_dropout, token_keys
from mega_model.loss import IGNORED
from mega_model.recompute import RecomputedAttention
from mega_train.config import Data
from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN
from mega_train.optim.loss_scaler import scaled
from mega_train.resolve import Plan


class MicroBatches:
    """The micro-batches of one optimizer step, or of one batch of a validation (a `executor.Work`).

    A micro-batch's loss is the mean over its tokens that count, and the step's is the mean over its
    micro-batches (Megatron's), or the mean over all tokens of the step that count. With context parallelism a
    rank computes the losses of its own tokens of every sample, times cp: then the mean over all replicas is
    the batch's, of losses and of gradients alike.
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
            batches: per micro-batch (samples, length + 1) token ids, or (samples, 4, length + 1) of
                `data.answers`; the same on every rank of cp.
            scale: of the loss; gradients are multiplied by it.
            samples: per micro-batch the numbers of its samples, which decide what dropout drops; None drops
                nothing, as in a validation.
        """
        self.models, self.plan, self.mesh, self.batches, self.scale = models, plan, mesh, batches, scale
        self.samples = samples
        self.length = batches[0].shape[-1] - 1
        self.place_s = token_positions(self.length, mesh.cp, device=mesh.device)
        # Megatron tells positions that begin again to a table alone: rotary ones are places in the sample
        begins_again = plan.run.data.reset_positions and plan.spec.positions != "rope"
        self.data = replace(plan.run.data, reset_positions=begins_again)
        per_token = plan.run.train.per_token_loss or plan.run.data.sft
        self.counted = self._counted_by_all() if per_token else None
        # A head that adds its gradient in forward adds in another order where several forwards go before a
        # backward, or where replicas sum after each micro-batch; a GPU would wait for the number.
        in_turn = plan.run.parallel.schedule != "gpipe" and plan.sharing.stage < 2
        self.known = samples is not None and in_turn and mesh.device.type == "cpu"

    @property
    def boundary(self) -> tuple[int, int]:
        tp, tokens = self.mesh.tp, self.plan.micro * self.length // self.mesh.cp.size
        return tokens // tp.size if tp.sequence else tokens, self.plan.spec.hidden

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        token_BS, target_BS, position_BS, document_BS = self._rows(micro)
        dropout = self._dropout(micro)
        rows, length = token_BS.shape
        attend: AttentionBackend = PackedAttention(
            rows,
            length,
            document_BS,
            cp=self.mesh.cp,
            dropout=dropout,
            attention=model.kernels.attention,
            softmax=model.kernels.masked_softmax,
        )
        x = self._own(token_BS) if received is None else received
        if self.plan.recompute.recomputes("core_attn"):
            attend = RecomputedAttention(attend)
        given = x, self._own(position_BS), attend, dropout or no_dropout
        if not model.stage.is_last:
            return model(*given)
        counted = self.counted
        if counted is None:
            counted = (target_BS != IGNORED).sum().clamp(min=1) * len(self.batches)
        known = self.scale * self.mesh.cp.size / float(counted) if self.known else None
        return scaled(model(*given, self._own(target_BS), known) * self.mesh.cp.size / counted, self.scale)

    def _counted_by_all(self) -> Tensor:
        """Tokens of all replicas' micro-batches that count, over dp: the mean over replicas undoes that."""
        own = [(self._rows(micro)[1] != IGNORED).sum() for micro in range(len(self.batches))]
        return self.mesh.dp.reduce(torch.stack(own).sum()).clamp(min=1) / self.mesh.dp.size

    def _own(self, x_BS: Tensor) -> Tensor:
        """What belongs to this rank's tokens: (T,) of the whole rows'."""
        return x_BS[:, self.place_s].flatten()

    def _dropout(self, micro: int) -> Dropout | None:
        train = self.plan.run.train
        if self.samples is None or not (train.hidden_dropout or train.attention_dropout):
            return None
        key_T = token_keys(train.seed, self.samples[micro], self.place_s)
        kernel = self.models[0].kernels.dropout_add
        return Dropout(train.hidden_dropout, train.attention_dropout, key_T, self.mesh.tp, kernel)

    def _rows(self, micro: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Tokens, targets and positions, (B, S) each, and documents where each sees only itself."""
        batch = torch.from_numpy(self.batches[micro]).to(self.mesh.device, non_blocking=True)
        return of_samples(batch, self.data, self.plan.eod)


def of_samples(batch: Tensor, data: Data, eod: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tokens, targets and positions, (B, S) each, and documents where each sees only itself.

    Args:
        batch: (B, S + 1) token ids, or (B, 4, S + 1) of `data.answers`.
        eod: the token that ends a document, where `data` asks for what needs it.
    """
    if batch.ndim == 3:
        target_BS = batch[:, TOKEN, 1:].masked_fill(batch[:, LEARNT, 1:] == 0, IGNORED)
        return batch[:, TOKEN, :-1], target_BS, batch[:, POSITION, :-1], batch[:, EXAMPLE, :-1]
    token_BS, target_BS = batch[:, :-1], batch[:, 1:]
    position_BS = torch.arange(token_BS.shape[1], device=batch.device).expand(*token_BS.shape)
    if data.eod_mask_loss:
        assert eod is not None
        target_BS = target_BS.masked_fill(token_BS == eod, IGNORED)
    if not (data.reset_positions or data.reset_attention):
        return token_BS, target_BS, position_BS, None
    assert eod is not None
    document_BS, place_BS = document_positions(token_BS, eod)
    apart_BS = document_BS if data.reset_attention else None
    return token_BS, target_BS, place_BS if data.reset_positions else position_BS, apart_BS
