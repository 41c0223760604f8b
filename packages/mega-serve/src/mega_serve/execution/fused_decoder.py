"""Run the layers of a decoder in one call of a numba kernel, for one token of each of a few sequences.

`Decoder.hidden_states` is the definition, and computes all other steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mega_model.block import DecoderBlock
from mega_model.decoder import Decoder
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel
from mega_model.layers import LayerNorm, RMSNorm
from mega_schema.spec import ModelSpec
from mega_serve.execution.packed_weights import Array, Int8Linear, LinearLayer, PackedLinear
from mega_serve.execution.paged_attention import NumbaPages
from mega_serve.execution.step_layout import StepLayout

# of a layer up to which starting torch's operations takes longer than numba's products of more rows
_SMALL_LAYER_BYTES = 2 << 20
_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "swiglu")  # in the order of the kernel's numbers


class FusedDecoder:
    """The layers of a model whose weights are packed, over pages that numba kernels read.

    Args:
        model: whole, one that `is_supported`.
    """

    def __init__(self, model: Decoder, pages: NumbaPages, kernels: NumbaKernels) -> None:
        spec = model.spec
        self._model = model
        self._pages = pages
        self._kernels = kernels
        blocks = _blocks(model)
        weights = [_panels(layer) for layer in _linear_layers(blocks[0])]
        is_small = sum(panels.nbytes for panels in weights) <= _SMALL_LAYER_BYTES
        most = kernels.decoder_layers.MAX_ROWS
        self.max_rows: int = most if is_small else min(most, *map(_max_rows, _linear_layers(blocks[0])))
        self._arrays = [_layer_arrays(block) for block in blocks]  # they own the memory of the table
        self._table = np.array([list(map(_address, arrays)) for arrays in self._arrays], np.intp)
        self._weights = _panels(blocks[0].qkv)[:0]
        self._slopes = np.array(blocks[0].mask.slopes or [0.0] * spec.heads, np.float32)
        self._eps = np.float32(spec.norm_eps)
        self._shape = kernels.decoder_layers.DecoderShape(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            ffn=spec.ffn,
            activation=_ACTIVATIONS.index(spec.activation),
            window=spec.sliding_window or 0,
        )

    @staticmethod
    def is_supported(model: Decoder) -> bool:
        """Whether one process holds the model, its layers are of a usual kind, and its weights are packed."""
        if model.tp.size > 1 or len(model.stage.layers) < model.spec.layers:
            return False
        layers = [layer for block in _blocks(model) for layer in _linear_layers(block)]
        return _has_usual_layers(model.spec) and all(map(_has_panels, layers))

    def takes(self, layout: StepLayout) -> bool:
        """Whether the step is a single token of few sequences."""
        return len(layout.position_T) == len(layout.chunk_C4) <= self.max_rows

    def hidden_states(self, token_T: Tensor, position_T: Tensor, layout: StepLayout) -> Tensor:
        """Compute everything but the head: (T, D), as `Decoder.hidden_states`."""
        model = self._model
        x_TD = model.embed_tokens(token_T, position_T).contiguous()
        cos_TR = sin_TR = torch.empty(len(x_TD), 0)
        if model.spec.rotary_dim:
            cos_TR, sin_TR = model.rotary(position_T)
        run_kernel(
            self._kernels.decoder_layers,
            "layers",
            as_array(x_TD),
            self._weights,
            self._table,
            cos_TR.numpy(),
            sin_TR.numpy(),
            self._pages.keys,
            self._pages.values,
            layout.chunk_C4,
            layout.pages,
            layout.slot_T,
            layout.longest,
            self._slopes,
            self._eps,
            self._shape,
        )
        hidden_TD: Tensor = model.final_norm(x_TD)
        return hidden_TD


def _blocks(model: Decoder) -> list[DecoderBlock]:
    blocks = [model.layers[str(layer)] for layer in model.stage.layers]
    return [block for block in blocks if isinstance(block, DecoderBlock)]


def _has_usual_layers(spec: ModelSpec) -> bool:
    return spec.activation in _ACTIVATIONS and not (
        spec.qk_norm or spec.rope_interleaved or spec.post_norm_residual or spec.parallel_residual
    )


def _linear_layers(block: DecoderBlock) -> tuple[LinearLayer, ...]:
    return block.qkv, block.out, block.gate_up if block.is_gated else block.up, block.down


def _has_panels(layer: LinearLayer) -> bool:
    return isinstance(layer.linear, PackedLinear | Int8Linear) and layer.linear.panels is not None


def _max_rows(layer: LinearLayer) -> int:
    assert isinstance(layer.linear, PackedLinear | Int8Linear)
    return layer.linear.max_rows


def _layer_arrays(block: DecoderBlock) -> list[Array | None]:
    """Return a layer's weights, biases, scales and sums, in the order of the kernel's table."""
    qkv, out, up, down = _linear_layers(block)
    assert isinstance(block.attn_norm, LayerNorm | RMSNorm)  # only an encoder may have none
    owners = (block.attn_norm, qkv, out, block.ffn_norm, up, down)
    biases = [getattr(owner, "bias", None) for owner in owners]  # RMSNorm has none
    weights = [_weight(owner) for owner in owners]
    linears = [getattr(owner, "linear", None) for owner in owners]
    scales = [linear.scale_O.numpy() if isinstance(linear, Int8Linear) else None for linear in linears]
    zeros = [linear.zero_O.numpy() if isinstance(linear, Int8Linear) else None for linear in linears]
    bias_arrays = [None if bias is None else as_array(bias.detach().contiguous()) for bias in biases]
    return [*weights, *bias_arrays, *scales, *zeros]


def _weight(owner: LinearLayer | LayerNorm | RMSNorm) -> Array:
    if not isinstance(owner, LayerNorm | RMSNorm):
        return _panels(owner)
    weight_D = owner.weight.detach()
    return as_array(weight_D + 1 if owner.weight_plus_one else weight_D.contiguous())


def _panels(layer: LinearLayer) -> Array:
    assert isinstance(layer.linear, PackedLinear | Int8Linear)
    assert layer.linear.panels is not None
    return layer.linear.panels


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
