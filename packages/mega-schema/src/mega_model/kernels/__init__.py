"""Kernels: faster versions of the model's functions, each checked against a reference."""

from __future__ import annotations

from mega_model.dropout import dropout_add
from mega_model.kernels import reference
from mega_model.kernels.interface import Kernels, Visible
from mega_model.kernels.products import add_product, linear

__all__ = ["REFERENCE", "Kernels", "Visible"]

REFERENCE = Kernels(
    rms_norm=reference.rms_norm,
    layer_norm=reference.layer_norm,
    add_rms_norm=reference.add_rms_norm,
    add_layer_norm=reference.add_layer_norm,
    bias_gelu=reference.bias_gelu,
    swiglu=reference.swiglu,
    angles=reference.angles,
    apply_rotary=reference.apply_rotary,
    apply_rotary_packed=reference.apply_rotary_packed,
    masked_softmax=reference.masked_softmax,
    attention=reference.attention,
    cross_entropy=reference.cross_entropy,
    dropout_add=dropout_add,
    linear=linear,
    add_product=add_product,
)
