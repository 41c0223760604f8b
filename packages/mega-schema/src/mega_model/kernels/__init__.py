"""The functions a model is made of that have faster versions, as one record chosen where a model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mega_model.kernels import reference


@dataclass(frozen=True, slots=True)
class Kernels:
    """One version of each function; `reference` is the definition of all of them."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]


REFERENCE = Kernels(reference.rms_norm, reference.layer_norm, reference.swiglu, reference.rotate)
