"""The encoder of one pipeline stage: a decoder's layers, read in both directions, with BERT's heads.

x = E[token] + P[position] + S[type]
layers as in `decoder`, with an `attend` that sees later tokens too: `PackedAttention(..., causal=False)`
in ModernBERT most layers see a window on both sides (arXiv:2412.13663)
logits = norm(gelu(W₁ x + b₁)) · Eᵀ + b          the masked tokens (arXiv:1810.04805)
binary = W₃ · tanh(W₂ x[first] + b₂) + b₃        of a row's first token: next sentence, or sentence order
task   = W₄ · drop(tanh(W₂ x[first] + b₂)) + b₄  in place of these, in a model with the head of a task
span   = W₄ · x + b₄                             of every token, in a model with the head of spans
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.dropout import DropoutFn, no_dropout
from mega_model.layers import ReplicatedEmbedding, ReplicatedLinear
from mega_model.runtime import Runtime
from mega_model.tensor_parallel_ops import select_tokens, sum_selected
from mega_schema.task_heads import HEAD


class Encoder(Decoder):
    """An encoder, or one pipeline stage of it.

    Rows of different lengths are padded, and padding is a document of its own: a token then sees the tokens
    of its row, and no padding.
    """

    def __init__(self, rt: Runtime) -> None:
        super().__init__(rt)
        if rt.stage.is_first and rt.spec.token_types is not None:
            self.token_type = ReplicatedEmbedding(rt, "token_type")
        if rt.stage.is_last and rt.spec.pooler:
            self.pooler = ReplicatedLinear(rt, "pooler")
        if rt.stage.is_last and rt.spec.binary_head:
            self.binary_head = ReplicatedLinear(rt, "binary_head")
        if rt.stage.is_last and rt.spec.task_head != "none":
            self.task_head = ReplicatedLinear(rt, HEAD)

    def forward(
        self,
        x: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn = no_dropout,
        target_T: Tensor | None = None,
        gradient: float | None = None,
        loss_weight_T: Tensor | None = None,
        token_type_T: Tensor | None = None,
        masked_M: Tensor | None = None,
        order_B: Tensor | None = None,
        first_B: Tensor | None = None,
        head_token_N: Tensor | None = None,
        head_drop: DropoutFn = no_dropout,
    ) -> Tensor:
        """Run this stage's part of the forward pass.

        Args:
            target_T: the original token of each masked token, or IGNORED; (M,) with `masked_M`.
            gradient, loss_weight_T: of the summed loss of the masked tokens, see `head_loss`.
            token_type_T: type of every token, whole on every rank; None: all are of type 0.
            masked_M: index of each token with a target, the same on every rank of tp; the head computes only
                these. Not with sequence parallelism, whose ranks hold different numbers of masked tokens.
            order_B: label of each row for the binary head; None: its loss is not computed.
            first_B: index of each row's first token on the whole token axis; None: rows have equal lengths.
            head_token_N: index, on the whole token axis, of each token that the task's head reads.
            head_drop: dropout before the task's head, of these tokens.

        Returns:
            as `Decoder.forward`; with `order_B`, (2,) the summed losses of the masked tokens and of the rows;
            with `head_token_N`, on the last stage the (N, K) logits of the task, on every rank of tp.
        """
        x_TD = self.hidden_states(x, position_T, attend, drop, None, token_type_T)
        if not self.stage.is_last:
            return x_TD
        if head_token_N is not None:
            return self.task_logits(x_TD, head_token_N, head_drop)
        loss: Tensor = self.head(
            x_TD if masked_M is None else x_TD[masked_M], target_T, gradient, loss_weight_T
        )
        if order_B is None:
            return loss
        if first_B is None:
            rows = len(order_B)
            first_B = torch.arange(rows, device=x_TD.device) * (len(position_T) // rows)
        logits_B2 = self.binary_logits(x_TD, first_B).float()
        return torch.stack((loss, F.cross_entropy(logits_B2, order_B, reduction="sum")))

    def hidden_states(
        self,
        x: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn = no_dropout,
        row_R: Tensor | None = None,
        token_type_T: Tensor | None = None,
    ) -> Tensor:
        """Compute everything but the heads: (T, D), normed on the last stage; `row_R` as in a decoder."""
        if self.stage.is_first:
            x_TD = self.embed_tokens(x, position_T)
            if self.spec.token_types is not None:
                types_T = torch.zeros_like(x) if token_type_T is None else token_type_T
                x_TD = x_TD + self.token_type(self.tp.local_shard(types_T))
            x = drop("embed", x_TD)
        return self.run_layers(x, position_T, attend, drop, row_R)

    def binary_logits(self, x_TD: Tensor, first_B: Tensor) -> Tensor:
        """Compute the two logits of every row, (B, 2), the same on every rank of tp.

        Args:
            x_TD: `hidden_states` of the last stage.
            first_B: index of each row's first token on the whole token axis.
        """
        row_BD, is_local_B = select_tokens(x_TD, first_B, self.tp)
        return sum_selected(self.binary_head(self.pooler(row_BD).tanh()), is_local_B, self.tp)

    def row_logits(self, x_TD: Tensor, rows: int) -> Tensor:
        """Compute the logits of the task's head in one process.

        Args:
            x_TD: `hidden_states` of rows of equal lengths.

        Returns:
            (rows, K); of a head that reads every token (rows, length, K).
        """
        token_T = torch.arange(len(x_TD), device=x_TD.device).view(rows, -1)
        if self.spec.pooler:
            return self.task_logits(x_TD, token_T[:, 0])
        return self.task_logits(x_TD, token_T.flatten()).unflatten(0, (rows, -1))

    def task_logits(self, x_TD: Tensor, token_N: Tensor, drop: DropoutFn = no_dropout) -> Tensor:
        """Compute the logits of the task's head, (N, K), the same on every rank of tp.

        Args:
            x_TD: `hidden_states` of the last stage.
            token_N: index of each token on the whole token axis: with a pooler the first of each row.
            drop: dropout of these tokens before the head.
        """
        row_ND, is_local_N = select_tokens(x_TD, token_N, self.tp)
        features_ND = self.pooler(row_ND).tanh() if self.spec.pooler else row_ND
        return sum_selected(self.task_head(drop(HEAD, features_ND)), is_local_N, self.tp)
