"""The FP8 recipe of a model, and the shapes that FP8 needs; `mega_model.fp8` computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fp8Format = Literal["e4m3", "hybrid"]
MULTIPLE = 16  # both dimensions of a rank's weight must divide by it: a GPU reads 16 bytes at once


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """The formats of the three products of every linear layer.

    Attributes:
        format: "e4m3" for all factors; "hybrid": gradients of outputs in e5m2 (arXiv:2209.05433).
        weight_gradients: compute weight gradients in FP8 too; otherwise from factors in the model's dtype.
    """

    format: Fp8Format
    weight_gradients: bool = True
