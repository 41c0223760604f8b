"""Faster versions of what a model computes, and the definitions they are held against."""

from __future__ import annotations

from mega_model.dropout import add_dropped
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
    rotate=reference.rotate,
    rotate_packed=reference.rotate_packed,
    masked_softmax=reference.masked_softmax,
    attention=reference.attention,
    cross_entropy=reference.cross_entropy,
    add_dropped=add_dropped,
    linear=linear,
    add_product=add_product,
)
