"""Faster versions of what a model computes, and the definitions they are held against."""

from __future__ import annotations

from mega_model.kernels import reference
from mega_model.kernels.record import Kernels

__all__ = ["REFERENCE", "Kernels"]

REFERENCE = Kernels(
    rms_norm=reference.rms_norm,
    layer_norm=reference.layer_norm,
    swiglu=reference.swiglu,
    rotate=reference.rotate,
    cross_entropy=reference.cross_entropy,
)
