"""What of a model is multiplied in FP8, and what shapes that takes; `mega_model.fp8` does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MULTIPLE = 16  # of both dimensions of a weight, on a rank: a GPU reads 16 bytes at once


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """How the three products of every matrix of a layer are made.

    Attributes:
        format: "e4m3" of all factors; "hybrid", gradients of outputs in e5m2 (arXiv:2209.05433).
        weight_gradients: whether theirs is made in FP8 too; otherwise of factors in the model's own dtype.
    """

    format: Literal["e4m3", "hybrid"]
    weight_gradients: bool = True
