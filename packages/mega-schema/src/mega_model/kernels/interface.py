"""The functions a model is made of that have faster versions, as one record chosen where a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from mega_model.distributed.mesh import Axis

# which keys a query sees: None, all; "before", those up to its own, the queries being the last of the tokens;
# or a mask, of switches or of what is added to the scores
Visible = Tensor | Literal["before"] | None


class CrossEntropy(Protocol):
    """log Σ exp(z) - z[target] of every token, over a vocabulary cut over tp."""

    def __call__(self, logits_CV: Tensor, target_C: Tensor, tp: Axis, scale: float | None) -> Tensor:
        """
        Args:
            logits_CV: of this rank's columns, none of them padding; a rank may have none. Overwritten: with
                `scale` times their gradient of the losses' sum, or where that is None with anything.
            target_C: this rank's columns; -1 for another rank's, IGNORED for a token that does not count.

        Returns:
            (C,) float32 losses in nats, the same on every rank of tp; zero for what does not count.
        """


class DropoutAdd(Protocol):
    """x with elements dropped and the rest larger, added to a residual: `mega_model.dropout.add_dropped`."""

    def __call__(self, x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
        """
        Args:
            x, residual: (..., D) of one shape; None adds to nothing.
            key: int64, one for every row of x.
        """


class Linear(Protocol):
    """A layer's output, and with the transposed weight the gradient of its input: `products.linear`."""

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, (T, O), of the dtype of x."""


class AddProduct(Protocol):
    """A product added to a float32 sum, as the gradient of a weight is: `products.add_product`."""

    def __call__(self, main_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool, rounded: bool) -> None:
        """
        Args:
            main_OI: float32; gradᵀ x is added to it, or with `first` written over what it holds.
            grad_TO, x_TI: of one dtype.
            rounded: the product is rounded to that dtype before it is added.
        """


@dataclass(frozen=True, slots=True)
class Kernels:
    """One version of each function; `reference` is the definition of all of them.

    Shapes and promises stand at the definitions. What is said to be given up may be overwritten.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    bias_gelu: Callable[[Tensor, Tensor | None, Literal["none", "tanh"]], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    apply_rotary_packed: Callable[[Tensor, Sequence[int], int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    masked_softmax: Callable[[Tensor, Tensor | None, float], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Visible], Tensor]
    cross_entropy: CrossEntropy
    dropout_add: DropoutAdd
    linear: Linear
    add_product: AddProduct
