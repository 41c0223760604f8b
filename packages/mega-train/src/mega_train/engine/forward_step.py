"""Forward step of a micro-batch on a stage: inputs, positions and targets; forward pass; mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend, PackedAttention, document_positions
from mega_model.batch_invariant_attention import BatchInvariantAttention
from mega_model.context_parallel import token_positions
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_model.dropout import Dropout, no_dropout, token_keys
from mega_model.kernels import Kernels
from mega_model.kernels.numba import load_kernels
from mega_model.loss import IGNORED
from mega_model.recompute import RecomputedAttention
from mega_train.config import DataConfig
from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN
from mega_train.optim.loss_scaler import scale_loss
from mega_train.resolve import ResolvedConfig


class ForwardStep:
    """The micro-batches of one optimizer step, or of one validation batch (an `executor.PipelineWork`).

    A micro-batch's loss is the mean over its tokens with a loss. The step's loss is the mean over its
    micro-batches (Megatron's default) or over all its tokens with a loss. With context parallelism a rank
    computes the losses of its own tokens of every sample, times cp: then the mean over all replicas is that
    of the batch, for losses and gradients alike.

    Attributes:
        terms: the terms of each micro-batch's loss, in the order of `ResolvedConfig.loss_terms`, on the rank
            of the last stage; empty if the loss has one term.
    """

    def __init__(
        self,
        models: Sequence[Decoder],
        config: ResolvedConfig,
        mesh: Mesh,
        batches: Sequence[np.ndarray],
        loss_scale: float,
        sample_numbers: Sequence[Sequence[int]] | None,
    ) -> None:
        """Prepare the micro-batches of a step.

        Args:
            models: this rank's stages, by chunk.
            batches: per micro-batch (samples, length + 1) token ids, or (samples, 4, length + 1) of
                `data.sft`; the same on every rank of cp. BERT and T5 have their own.
            loss_scale: factor of the loss, and so of the gradients.
            sample_numbers: per micro-batch, the seeds of its dropout; None disables dropout, as in a
                validation.
        """
        self.models = models
        self.config = config
        self.mesh = mesh
        self.batches = batches
        self.loss_scale = loss_scale
        self.sample_numbers = sample_numbers
        self.terms = list[Tensor]()
        self.seq_length = self.length_of(batches[0])
        self.position_s = token_positions(self.seq_length, mesh.cp, device=mesh.device)
        # as in Megatron, --reset-position-ids affects only position tables, not rotary positions
        resets_positions = config.run.data.reset_positions and config.spec.positions != "rope"
        self.data_config = replace(config.run.data, reset_positions=resets_positions)
        per_token = config.run.train.per_token_loss or config.run.data.sft
        self.loss_tokens = self._count_loss_tokens() if per_token else None
        # The head may add its weight gradient during forward if the factor is known. That changes the order
        # of sums where several forwards precede a backward (gpipe) or replicas reduce after each micro-batch
        # (ZeRO 2); on a GPU reading the factor would block.
        accumulates_in_order = config.run.parallel.schedule != "gpipe" and config.sharding_config.stage < 2
        self.knows_loss_grad = (
            sample_numbers is not None and accumulates_in_order and mesh.device.type == "cpu"
        )

    def length_of(self, batch: np.ndarray) -> int:
        """Return the tokens of a sample of which the model predicts the targets."""
        return int(batch.shape[-1]) - 1

    def boundary(self, micro: int) -> tuple[int, int]:
        tp = self.mesh.tp
        tokens = self.config.micro_batch_size * self.seq_length // self.mesh.cp.size
        return tokens // tp.size if tp.sequence else tokens, self.config.spec.hidden

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        model = self.models[chunk]
        token_BS, target_BS, position_BS, document_BS = self._split_micro_batch(micro)
        dropout = self._dropout(micro)
        attend = self._attention(model.kernels, micro, document_BS, dropout)
        x = self._local_tokens(token_BS) if received is None else received
        if self.config.recompute.recomputes("core_attn"):
            attend = RecomputedAttention(attend)
        inputs = x, self._local_tokens(position_BS), attend, dropout or no_dropout
        if not model.stage.is_last:
            return model(*inputs)
        weight_BS = self._loss_weights(target_BS)
        loss_tokens = self.loss_tokens
        if loss_tokens is None:
            loss_tokens = _at_least_one(_sum_weights(target_BS, weight_BS)) * len(self.batches)
        loss_grad = self.loss_scale * self.mesh.cp.size / float(loss_tokens) if self.knows_loss_grad else None
        weight_T = None if weight_BS is None else self._local_tokens(weight_BS)
        loss = model(*inputs, self._local_tokens(target_BS), loss_grad, weight_T)
        return scale_loss(loss * self.mesh.cp.size / loss_tokens, self.loss_scale)

    def _loss_weights(self, target_BS: Tensor) -> Tensor | None:
        """Return the weight of each target's loss, (B, S) float32, 0 without a target; None: all weigh 1."""
        return None

    def _attention(
        self, kernels: Kernels, micro: int, document_BS: Tensor | None, dropout: Dropout | None
    ) -> AttentionBackend:
        rows, length = len(self.batches[micro]), self.seq_length
        train = self.config.run.train
        if train.batch_invariant and (dropout is None or not train.attention_dropout):
            numba = load_kernels(package="mega-train")
            return BatchInvariantAttention(numba, rows, length, document_BS, kernels.attention)
        return PackedAttention(
            rows,
            length,
            document_BS,
            cp=self.mesh.cp,
            dropout=dropout,
            attention=kernels.attention,
            softmax=kernels.masked_softmax,
        )

    def _count_loss_tokens(self) -> Tensor:
        """Count the tokens of all replicas that have a loss, divided by dp.

        The mean over the replicas cancels that division.
        """
        targets = [self._split_micro_batch(micro)[1] for micro in range(len(self.batches))]
        counts = [_sum_weights(target_BS, self._loss_weights(target_BS)) for target_BS in targets]
        return _at_least_one(self.mesh.dp.reduce(torch.stack(counts).sum())) / self.mesh.dp.size

    def _local_tokens(self, x_BS: Tensor) -> Tensor:
        """Select the values of this rank's tokens, flattened to (T,)."""
        return x_BS[:, self.position_s].flatten()

    def _dropout(self, micro: int, position_s: Tensor | None = None) -> Dropout | None:
        """Return the dropout of a micro-batch, None in a validation.

        Args:
            position_s: numbers of the tokens of a sample, by which their dropout differs; None: positions.
        """
        train = self.config.run.train
        if self.sample_numbers is None or not (train.hidden_dropout or train.attention_dropout):
            return None
        numbers_s = self.position_s if position_s is None else position_s
        key_T = token_keys(train.seed, self.sample_numbers[micro], numbers_s)
        kernel = self.models[0].kernels.dropout_add
        return Dropout(train.hidden_dropout, train.attention_dropout, key_T, self.mesh.tp, kernel)

    def _split_micro_batch(self, micro: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split micro-batch `micro` as `split_batch` does."""
        batch = torch.from_numpy(self.batches[micro]).to(self.mesh.device, non_blocking=True)
        return split_batch(batch, self.data_config, self.config.eod)


def _sum_weights(target_BS: Tensor, weight_BS: Tensor | None) -> Tensor:
    return ((target_BS != IGNORED) if weight_BS is None else weight_BS).sum()


def _at_least_one(count: Tensor) -> Tensor:
    """Return a divisor: 1 if there is nothing to divide."""
    return torch.where(count > 0, count, 1)


def split_batch(
    batch: Tensor, data_config: DataConfig, eod: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split a batch into tokens, targets, positions and, for limited attention, documents; (B, S) each.

    Args:
        batch: (B, S + 1) token ids, or (B, 4 or 5, S + 1) of `data.sft` or `data.prefix_reader`.
        eod: the end-of-document token, if `data_config` needs it.
    """
    if batch.ndim == 3:
        target_BS = batch[:, TOKEN, 1:].masked_fill(batch[:, LEARNT, 1:] == 0, IGNORED)
        return batch[:, TOKEN, :-1], target_BS, batch[:, POSITION, :-1], batch[:, EXAMPLE, :-1]
    token_BS, target_BS = batch[:, :-1], batch[:, 1:]
    position_BS = torch.arange(token_BS.shape[1], device=batch.device).expand(*token_BS.shape)
    if data_config.eod_mask_loss:
        assert eod is not None
        target_BS = target_BS.masked_fill(token_BS == eod, IGNORED)
    if not (data_config.reset_positions or data_config.reset_attention):
        return token_BS, target_BS, position_BS, None
    assert eod is not None
    document_BS, document_position_BS = document_positions(token_BS, eod)
    masked_document_BS = document_BS if data_config.reset_attention else None
    return (
        token_BS,
        target_BS,
        document_position_BS if data_config.reset_positions else position_BS,
        masked_document_BS,
    )
