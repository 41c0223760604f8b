"""Accumulation of weight gradients in float32 by the backward pass of each layer.

Autograd would create a gradient in the weight's dtype for every micro-batch, to be added up afterwards. Here
the product is accumulated into a float32 main gradient directly (Megatron's gradient accumulation fusion). It
can be deferred: a zero-bubble pipeline first computes what the previous stage waits for (arXiv:2401.10241
§2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mega_model.kernels.interface import AddProduct
from mega_model.kernels.products import add_product


class WeightGradients:
    """The main gradients of one rank's linear and embedding weights.

    Gradients of weights without a registered main gradient are returned to autograd.

    Attributes:
        fused: accumulate products in float32; otherwise a product is first rounded to the dtype of its
            factors (Megatron's --no-gradient-accumulation-fusion).
        on_grad_ready: called with a weight after all its uses have accumulated for one pass of the model.
            That is in every backward pass, or in forward for a head whose loss has a known gradient.
    """

    def __init__(self, *, fused: bool = True, product: AddProduct = add_product) -> None:
        self.fused = fused
        self._product = product
        self.on_grad_ready: Callable[[nn.Parameter], None] | None = None
        self._main_grads: dict[Tensor, Callable[[], Tensor]] = {}
        self._extra_uses: Counter[Tensor] = Counter()
        self._accumulations: Counter[Tensor] = Counter()
        self._deferring_to: list[Callable[[], None]] | None = None
        self._deferred: dict[Hashable, list[Callable[[], None]]] = {}

    def register_main_grad(self, weight: nn.Parameter, main_grad: Callable[[], Tensor] | None) -> None:
        """Accumulate gradients of `weight` into the tensor that `main_grad` returns, float32 of its shape.

        Args:
            main_grad: called at every accumulation; None returns the gradients to autograd.
        """
        if main_grad is None:
            self._main_grads.pop(weight, None)
        else:
            self._main_grads[weight] = main_grad

    def share_weight(self, weight: nn.Parameter) -> nn.Parameter:
        """Register one more layer that uses the weight, and return the weight.

        The gradient is complete after one more accumulation per pass.
        """
        self._extra_uses[weight] += 1
        return weight

    @property
    def is_deferring(self) -> bool:
        """Whether accumulations are being deferred."""
        return self._deferring_to is not None

    @contextmanager
    def defer(self, pass_: Hashable) -> Iterator[None]:
        """Defer the accumulations of the backward pass inside, until `run_deferred` of the same name."""
        assert self._deferring_to is None
        self._deferring_to = self._deferred.setdefault(pass_, [])
        try:
            yield
        finally:
            self._deferring_to = None

    @torch.no_grad()
    def run_deferred(self, pass_: Hashable) -> None:
        """Run the accumulations that were deferred under this name."""
        for addition in self._deferred.pop(pass_):
            addition()

    def accumulate(self, weight: nn.Parameter, x_TI: Callable[[], Tensor], grad_TO: Tensor) -> Tensor | None:
        """Accumulate gradᵀ x, now or deferred.

        Args:
            x_TI: returns the layer's whole input; called once, when the product is computed.

        Returns:
            the gradient for autograd: None, unless the weight has no main gradient.
        """
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            return grad_TO.t() @ x_TI()
        self._run_or_defer(weight, lambda: self.accumulate_product(main_grad(), grad_TO, x_TI()))
        return None

    def accumulate_product(
        self, main_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool = False
    ) -> None:
        """Compute main += gradᵀ x in float32, for factors of any dtype.

        Args:
            first: overwrite main, which may hold anything.
        """
        self._product(main_OI, grad_TO, x_TI, first=first, rounded=not self.fused)

    def main_grad(self, weight: nn.Parameter) -> Tensor | None:
        """Return the main gradient of a weight, or None if autograd has its gradients.

        A caller that adds to it must call `mark_accumulated` once per pass.
        """
        main_grad = self._main_grads.get(weight)
        return None if main_grad is None else main_grad()

    def accumulate_with(self, weight: nn.Parameter, addition: Callable[[Tensor], object]) -> Tensor | None:
        """Let `addition` add to a float32 tensor of the weight's shape; otherwise as `accumulate`."""
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            grad = torch.zeros_like(weight, dtype=torch.float32)
            addition(grad)
            return grad.to(weight.dtype)
        self._run_or_defer(weight, lambda: addition(main_grad()))
        return None

    def accumulate_rows(self, weight: nn.Parameter, row_T: Tensor, grad_TD: Tensor) -> Tensor | None:
        """Add grad[t] to row `row_T[t]` for every t; otherwise as `accumulate`."""
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            return torch.ops.aten.embedding_dense_backward(grad_TD, row_T, weight.shape[0], -1, False)
        # on a GPU index_add_ adds in arbitrary order; index_put_ sorts first and is reproducible
        if weight.device.type == "cpu":
            self._run_or_defer(weight, lambda: main_grad().index_add_(0, row_T, grad_TD.float()))
        else:
            self._run_or_defer(
                weight, lambda: main_grad().index_put_((row_T,), grad_TD.float(), accumulate=True)
            )
        return None

    def accumulate_scaled(self, weight: nn.Parameter, grad: Tensor, scale: Tensor) -> Tensor | None:
        """Add `scale` times a finished gradient; otherwise as `accumulate`.

        Never deferred: that would only keep the gradient in memory for longer.

        Args:
            grad: float32, of the weight's shape.
            scale: a number.
        """
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            return (grad * scale).to(weight.dtype)
        main_grad().addcmul_(grad, scale)
        self.mark_accumulated(weight)
        return None

    def _run_or_defer(self, weight: nn.Parameter, addition: Callable[[], object]) -> None:
        def add() -> None:
            addition()
            self.mark_accumulated(weight)

        if self._deferring_to is None:
            add()
        else:
            self._deferring_to.append(add)

    def mark_accumulated(self, weight: nn.Parameter) -> None:
        """Record that one use of the weight has accumulated its gradient of one pass."""
        self._accumulations[weight] += 1
        if (
            self.on_grad_ready is not None
            and self._accumulations[weight] % (1 + self._extra_uses[weight]) == 0
        ):
            self.on_grad_ready(weight)
