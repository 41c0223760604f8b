"""The functions of a model that have faster versions: one record, chosen before a model is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from mega_model.distributed.mesh import Axis

# Which keys a query sees. None: all; "before": those up to its own position, the queries being the last
# tokens; a tensor: a boolean mask, or a bias to add to the scores.
Visible = Tensor | Literal["before"] | None


class CrossEntropy(Protocol):
    """A function that computes log Σ exp(z) - z[target] of every token, over a vocabulary split over tp."""

    def __call__(self, logits_CV: Tensor, target_C: Tensor, tp: Axis, scale: float | None) -> Tensor:
        """Compute the loss of every token, and with `scale` the gradient of the logits.

        Args:
            logits_CV: this rank's columns without padding; a rank may have none. Overwritten: with `scale`
                times the gradient of the summed losses, or with unspecified values if scale is None.
            target_C: as this rank's columns; -1 for another rank's, IGNORED for an ignored token.

        Returns:
            (C,) float32 losses in nats, the same on every rank of tp; zero for ignored tokens.
        """


class DropoutAdd(Protocol):
    """A function that applies dropout to x and adds a residual: `mega_model.dropout.dropout_add`."""

    def __call__(self, x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
        """Apply dropout to x and add the residual.

        Args:
            x, residual: (..., D) of one shape; without a residual nothing is added.
            key: int64, one per row of x.
        """


class Linear(Protocol):
    """A function that computes a linear layer, or with Wᵀ its input gradient: `products.linear`."""

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b, (T, O), in the dtype of x."""


class OrderedLinear(ABC):
    """A `Linear` that also fixes the order in which the ranks' parts of a product are added."""

    @abstractmethod
    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b, (T, O), in the dtype of x."""

    @abstractmethod
    def reduce_product(self, x_TI: Tensor, weight_OI: Tensor, tp: Axis) -> Tensor:
        """Compute x Wᵀ summed over the ranks of tp; with sequence parallelism this rank's tokens of it."""


class AddProduct(Protocol):
    """A function that adds a weight gradient to a float32 sum: `products.add_product`."""

    def __call__(self, main_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool, rounded: bool) -> None:
        """Add gradᵀ x to `main_OI`.

        Args:
            main_OI: float32; gradᵀ x is added to it, or with `first` overwrites it.
            grad_TO, x_TI: of one dtype.
            rounded: round the product to that dtype before it is added.
        """


@dataclass(frozen=True, slots=True)
class Kernels:
    """One version of each function; `reference` defines all of them.

    Shapes and contracts are documented in `reference`. An argument marked there as "may be overwritten" must
    not be used after the call.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    bias_gelu: Callable[[Tensor, Tensor | None, Literal["none", "tanh"]], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    apply_rotary_packed: Callable[[Tensor, Sequence[int], int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    masked_softmax: Callable[[Tensor, Tensor | None, float], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor]
    cross_entropy: CrossEntropy
    dropout_add: DropoutAdd
    linear: Linear
    add_product: AddProduct
