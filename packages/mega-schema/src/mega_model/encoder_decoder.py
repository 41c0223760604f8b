"""An encoder and a decoder that attends to its output; both share the embeddings (arXiv:1910.10683).

memory = norm(layers of E[token] + P[position])       the encoder's tokens, in both directions
x = E[token] + P[position]                            the decoder's tokens
for every layer of the decoder: as in `decoder`, and between attention and feed-forward
                  x = x + O · attend(Q of norm(x), K and V of memory)
logits = norm(x) · Hᵀ + b                             H is E if they are tied; T5 1.0 divides norm(x) by √D
scores of tokens of one side get a learned bias by distance in a model with relative positions
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mega_model.attention import Memory
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.dropout import DropoutFn, no_dropout
from mega_model.layers import build_norm
from mega_model.relative_positions import RelativePositions
from mega_model.runtime import Runtime


class EncoderInput(NamedTuple):
    """The input of the encoder, for the samples of a decoder's input.

    Attributes:
        token_E, position_E: tokens and their positions, whole on every rank of tp.
        attend: attention among these tokens, in both directions.
        cross_attend: attention of the decoder's tokens to these.
        drop: dropout of the encoder's residual branches.
    """

    token_E: Tensor
    position_E: Tensor
    attend: AttentionBackend
    cross_attend: AttentionBackend
    drop: DropoutFn = no_dropout


class EncoderDecoder(Decoder):
    """A model with an encoder and a decoder, or one pipeline stage of it.

    Between stages the states of both sides travel in one tensor, the encoder's tokens first: the first stage
    embeds both, the encoder's layers let the decoder's tokens pass, and the decoder's layers let the output
    of the encoder pass. So a stage boundary may be anywhere, every schedule works, and only the first stage
    has embeddings.
    """

    def __init__(self, rt: Runtime) -> None:
        super().__init__(rt)
        encoder_layers = rt.spec.encoder_layers
        assert encoder_layers is not None
        layers = rt.stage.layers
        self.encoder_groups = rt.recompute.groups([i for i in layers if i < encoder_layers])
        self.recompute_groups = rt.recompute.groups([i for i in layers if i >= encoder_layers])
        self.encoder_norm = build_norm(rt, "encoder_norm") if encoder_layers - 1 in layers else None
        self.relative_bias = RelativePositions(rt)
        self.output_scale = rt.spec.hidden**-0.5 if rt.spec.scale_output else 1.0
        if rt.stage.is_first:
            rt.weight_gradients.share_weight(self.embed.weight)  # the encoder's tokens and the decoder's

    def forward(
        self,
        x: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn = no_dropout,
        target_T: Tensor | None = None,
        gradient: float | None = None,
        loss_weight_T: Tensor | None = None,
        source: EncoderInput | None = None,
        labelled_M: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's part of the forward pass.

        Args:
            x: (T,) token ids of the decoder on the first stage; (E + T, D) from the previous stage on the
                others. `position_T`, `attend`, `drop` and `target_T` are of the decoder's tokens.
            target_T: as in `Decoder.forward`; (M,) with `labelled_M`.
            source: the input of the encoder; required.
            labelled_M: index of each token with a target, the same on every rank of tp; the head computes
                only these. Not with sequence parallelism, whose ranks hold different numbers of them.

        Returns:
            as `Decoder.forward`, with (E + T, D) for the next stage.
        """
        x = self.hidden_states(x, position_T, attend, drop, None, source)
        if not self.stage.is_last:
            return x
        loss: Tensor = self.head(
            x if labelled_M is None else x[labelled_M], target_T, gradient, loss_weight_T
        )
        return loss

    def hidden_states(
        self,
        x: Tensor,
        position_T: Tensor,
        attend: AttentionBackend,
        drop: DropoutFn = no_dropout,
        row_R: Tensor | None = None,
        source: EncoderInput | None = None,
    ) -> Tensor:
        """Compute everything but the head.

        Returns:
            (E + T, D) of both sides; on the last stage (T, D) of the decoder, or (R, D) as in a decoder.
        """
        assert source is not None
        if self.stage.is_first:
            x_ED = source.drop("embed", self.embed_tokens(source.token_E, source.position_E))
            x_TD = drop("embed", self.embed_tokens(x, position_T))
        else:
            source_tokens = len(self.tp.local_shard(source.position_E))
            x_ED, x_TD = x[:source_tokens], x[source_tokens:]
        encoder_attend = self.relative_bias.wrap(source.attend, causal=False)
        x_ED = self.run_groups(self.encoder_groups, x_ED, source.position_E, encoder_attend, source.drop)
        if self.encoder_norm is not None:
            x_ED = self.encoder_norm(x_ED)
        memory = Memory(x_ED, source.cross_attend)
        attend = self.relative_bias.wrap(attend, causal=True)
        x_TD = self.run_groups(self.recompute_groups, x_TD, position_T, attend, drop, row_R, memory)
        if not self.stage.is_last:
            return torch.cat((x_ED, x_TD))
        x_TD = self.final_norm(x_TD)
        return x_TD if self.output_scale == 1 else x_TD * self.output_scale
