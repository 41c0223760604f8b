"""The decoder of one pipeline stage: embedding, blocks, final norm and head.

x = E[token] + P[position]      learned or sinusoidal positions; E may be scaled or normed first
for every layer:  x = x + O · attend(Q, K, V of norm(x))            rotary positions turn Q and K
                  x = x + W₂ · act(W₁ · norm(x))                    without a gate (Radford et al. 2019)
               or x = x + W₂ · (act(G · norm(x)) ∘ (U · norm(x)))   with a gate (arXiv:2002.05202)
                  norm(x) is of the layer's input in a model with parallel residual branches
logits = norm(x) · Hᵀ           H is E if they are tied
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from mega_model.attention import Angles, Memory, rotary_angles
from mega_model.attention_backends import AttentionBackend
from mega_model.block import DecoderBlock
from mega_model.dropout import DropoutFn, no_dropout
from mega_model.layers import LMHead, MaskedLMHead, ReplicatedEmbedding, VocabEmbedding, build_norm, sinusoids
from mega_model.recompute import recompute, recompute_sharded
from mega_model.runtime import Runtime


class Decoder(nn.Module):
    """A decoder-only model, or one pipeline stage of it.

    Layers keep their global numbers, so a parameter has the same name on every layout.

    Attributes:
        rotary: the function from positions to rotary angles; a server replaces it by a `RotaryTable`.
        local_rotary: that of the layers with a window in a model with `global_attention_every`.
    """

    def __init__(self, rt: Runtime) -> None:
        super().__init__()
        self.spec = rt.spec
        self.stage = rt.stage
        self.tp = rt.tp
        self.kernels = rt.kernels
        self.rotary: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(
            rotary_angles, m=rt.spec, angles=rt.kernels.angles
        )
        local = replace(rt.spec, rope_theta=rt.spec.rope_theta_local)
        self.local_rotary = partial(rotary_angles, m=local, angles=rt.kernels.angles)
        self.recompute_groups = rt.recompute.groups(rt.stage.layers)
        self.distribute_saved = rt.recompute.distribute_saved
        if rt.stage.is_first:
            self.embed = VocabEmbedding(rt, "embed")
        self.layers = nn.ModuleDict({str(i): DecoderBlock(rt, i) for i in rt.stage.layers})
        if rt.stage.is_last:
            self.final_norm = build_norm(rt, "final_norm")
        if rt.stage.is_last and rt.spec.task_head == "none":
            self.head = (LMHead if rt.spec.head_transform == "none" else MaskedLMHead)(rt, "head")
            if rt.stage.is_first and rt.spec.tied:
                # registers the second use of the weight and returns it
                self.head.weight = rt.weight_gradients.share_weight(self.embed.weight)
        if rt.stage.is_first and rt.spec.positions == "learned":
            self.position = ReplicatedEmbedding(rt, "position")
        if rt.stage.is_first and rt.spec.embed_norm:
            self.embed_norm = build_norm(rt, "embed_norm")

    def forward(
        self,
        x: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn = no_dropout,
        target_T: Tensor | None = None,
        gradient: float | None = None,
        loss_weight_T: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's part of the forward pass.

        Args:
            x: (T,) token ids on the first stage; (T, D) from the previous stage on the others.
            position_T: position of every token in its document, whole on every rank.
            drop: dropout of the residual branches.
            target_T: the next token of each token, or IGNORED; whole on every rank of tp. None: return
                logits.
            gradient, loss_weight_T: of the summed loss, see `head_loss`.

        Returns:
            (T, D) for the next stage; on the last stage the summed loss of the tokens in nats, or this rank's
            (T, V) logits.
        """
        x_TD = self.hidden_states(x, position_T, attend, drop)
        return self.head(x_TD, target_T, gradient, loss_weight_T) if self.stage.is_last else x_TD

    def hidden_states(
        self,
        x: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn = no_dropout,
        row_R: Tensor | None = None,
    ) -> Tensor:
        """Compute everything but the head: (T, D), normed on the last stage.

        Args:
            row_R: tokens whose states are needed. The last stage returns these only, (R, D); the last layer
                computes keys and values for all tokens, and the rest for these. `attend` gets their queries.
        """
        x_TD = drop("embed", self.embed_tokens(x, position_T)) if self.stage.is_first else x
        return self.run_layers(x_TD, position_T, attend, drop, row_R)

    def run_layers(
        self,
        x_TD: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn,
        row_R: Tensor | None,
    ) -> Tensor:
        """Compute this stage's layers of embedded tokens; the result is that of `hidden_states`."""
        x_TD = self.run_groups(self.recompute_groups, x_TD, position_T, attend, drop, row_R)
        return self.final_norm(x_TD) if self.stage.is_last else x_TD

    def run_groups(
        self,
        groups: Sequence[tuple[Sequence[int], bool]],
        x_TD: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn,
        row_R: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Compute groups of layers, each with whether backward recomputes it."""
        angles = self.rotary(position_T) if self.spec.rotary_dim else None
        has_local = self.spec.rotary_dim and self.spec.global_attention_every is not None
        local_angles = self.local_rotary(position_T) if has_local else angles
        for layers, is_recomputed in groups:
            run_layers = partial(
                self._run_layers, layers, (angles, local_angles), attend, drop, row_R, memory
            )
            x_TD = self._recompute(run_layers, x_TD) if is_recomputed else run_layers(x_TD)
        return x_TD

    def _run_layers(
        self,
        layers: Sequence[int],
        angles: tuple[Angles, Angles],
        attend: AttentionBackend,
        drop: DropoutFn,
        row_R: Tensor | None,
        memory: Memory | None,
        x_TD: Tensor,
    ) -> Tensor:
        for layer in layers:
            rows = row_R if layer == self.spec.layers - 1 else None
            is_local = self.spec.is_local(layer)
            x_TD = self.layers[str(layer)](x_TD, angles[is_local], attend, drop, rows, memory)
        return x_TD

    def _recompute(self, run_layers: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
        return (
            recompute_sharded(run_layers, x_TD, self.tp)
            if self.distribute_saved
            else recompute(run_layers, x_TD)
        )

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return this rank's slice of the logits, (T, V); columns past the true vocabulary mean nothing."""
        return self.head(x_TD)

    def token_losses(
        self, token_T: Tensor, position_T: Tensor, attend: AttentionBackend, target_T: Tensor
    ) -> Tensor:
        """Return the negated log-probability of every target, (T,) float32, on a stage that is all stages."""
        return self.head.token_losses(self.hidden_states(token_T, position_T, attend), target_T)

    def embed_tokens(self, token_T: Tensor, position_T: Tensor) -> Tensor:
        """Return the input of the first block, (T, D)."""
        x_TD = self.embed(token_T)
        if self.spec.embed_norm:
            x_TD = self.embed_norm(x_TD)
        if self.spec.scale_embedding:
            x_TD = x_TD * math.sqrt(self.spec.hidden)
        local_position_T = self.tp.local_shard(position_T)
        if self.spec.positions == "learned":
            x_TD = x_TD + self.position(local_position_T)
        elif self.spec.positions == "sinusoidal":
            x_TD = x_TD + sinusoids(local_position_T, self.spec.hidden, self.kernels.angles).to(x_TD.dtype)
        return x_TD
