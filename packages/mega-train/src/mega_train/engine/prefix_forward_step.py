"""Forward step of a micro-batch of a prefix language model."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.dropout import Dropout
from mega_model.kernels import Kernels
from mega_model.loss import IGNORED
from mega_model.prefix_attention import PrefixAttention, find_prefix_spans
from mega_train.data.prefix_reader import PREFIX
from mega_train.data.sft import EXAMPLE
from mega_train.engine.forward_step import ForwardStep


class PrefixForwardStep(ForwardStep):
    """The micro-batches of one optimizer step; batches are (samples, 5, length + 1) of `prefix_reader`.

    A micro-batch's loss is the mean over its tokens with a loss, weighted by position on request.
    """

    def _attention(
        self, kernels: Kernels, micro: int, document_BS: Tensor | None, dropout: Dropout | None
    ) -> AttentionBackend:
        batch = self.batches[micro][..., : self.seq_length]
        return PrefixAttention(
            len(batch),
            self.seq_length,
            find_prefix_spans(batch[:, EXAMPLE], batch[:, PREFIX]),
            dropout=dropout,
            attention=kernels.attention,
            softmax=kernels.masked_softmax,
        )

    def _loss_weights(self, target_BS: Tensor) -> Tensor | None:
        """Return BigScience's weights: the frequency of a position as a target, if prefixes are random.

        2 (S - i) / (S + 1) for token i of S; 0 without a target.
        """
        if not self.config.run.objective.reweight:
            return None
        length = self.seq_length
        weight_S = torch.arange(length, 0, -1, dtype=torch.float32, device=target_BS.device)
        return weight_S * (2 / (length + 1)) * (target_BS != IGNORED)
