"""T5's tables of relative positions, and the attention backend that adds their biases to the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.kernels.relative_bias import relative_buckets
from mega_model.runtime import Runtime


class RelativeBias(nn.Module):
    """A bias per head and bucket of distances; the heads are split over tp."""

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__()
        m = rt.spec
        self.buckets = m.relative_buckets
        self.max_distance = m.relative_max_distance
        self.causal = m.has_cross_attention(layer)
        self.weight = rt.new_param(f"relative_bias.{layer}.weight")

    def forward(self) -> Tensor:
        """Return the bias of each head and distance, (N, D) float32, see `AttentionMask.bias_ND`."""
        device = self.weight.device
        bucket_D = relative_buckets(self.buckets, self.max_distance, causal=self.causal, device=device)
        return self.weight.float()[bucket_D].t()


class RelativePositions(nn.ModuleDict):
    """The tables of one pipeline stage, by the number of the first layer that uses each."""

    def __init__(self, rt: Runtime) -> None:
        m = rt.spec
        self.table_of = dict[int, int]()
        self.has_cross_attention = m.has_cross_attention
        for layer in rt.stage.layers if m.positions == "relative" else ():
            side = m.has_cross_attention(layer)
            same_side = (first for first in rt.stage.layers if m.has_cross_attention(first) == side)
            self.table_of[layer] = layer if m.relative_per_layer else next(same_side)
        super().__init__(
            {str(layer): RelativeBias(rt, layer) for layer in sorted(set(self.table_of.values()))}
        )

    def wrap(self, attend: AttentionBackend, *, causal: bool) -> AttentionBackend:
        """Return the backend with the biases of the layers of one side: the decoder's are causal."""
        tables = {table for table in self.table_of.values() if self.has_cross_attention(table) is causal}
        # one lookup for all layers, outside of what backward recomputes
        biases = {table: self[str(table)]() for table in tables}
        bias_of = {layer: biases[table] for layer, table in self.table_of.items() if table in tables}
        return BiasedAttention(attend, bias_of) if bias_of else attend


@dataclass(frozen=True, slots=True)
class BiasedAttention:
    """An attention backend whose scores have the bias of the calling layer.

    Attributes:
        bias_of: (N, D) per layer.
    """

    attend: AttentionBackend
    bias_of: Mapping[int, Tensor]

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        return self.attend(layer, q_TNH, k_TKH, v_TKH, replace(mask, bias_ND=self.bias_of[layer]))
