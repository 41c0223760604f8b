"""Where the backward pass of a layer leaves the gradient of its weight.

Autograd would make a gradient in the weight's dtype for every micro-batch, which something then adds up. Here
the product is added to a float32 main gradient as it is made (Megatron's gradient accumulation fusion), and
it may be put off: a zero-bubble pipeline first does what the stage before waits for (arXiv:2401.10241 §2).
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

    A weight that `into` did not name has its gradient returned to autograd.

    Attributes:
        fused: a product is added in float32, as it is made; else it is rounded to the precision of its
            factors before (Megatron's --no-gradient-accumulation-fusion).
        ready: called with a weight when as many of its uses have added as one pass of the model has: in every
            backward pass, but for a head whose loss has a known gradient, which adds in forward.
    """

    def __init__(self, *, fused: bool = True, product: AddProduct = add_product) -> None:
        self.fused, self._product = fused, product
        self.on_grad_ready: Callable[[nn.Parameter], None] | None = None
        self._main_grads: dict[Tensor, Callable[[], Tensor]] = {}
        self._extra_uses: Counter[Tensor] = Counter()
        self._accumulations: Counter[Tensor] = Counter()
        self._deferring_to: list[Callable[[], None]] | None = None
        self._deferred: dict[Hashable, list[Callable[[], None]]] = {}

    def register_main_grad(self, weight: nn.Parameter, main_grad: Callable[[], Tensor] | None) -> None:
        """From now on the gradients of `weight` add to what `main` gives at that time, float32 of its shape.

        Args:
            main: None returns them to autograd.
        """
        if main_grad is None:
            self._main_grads.pop(weight, None)
        else:
            self._main_grads[weight] = main_grad

    def share_weight(self, weight: nn.Parameter) -> nn.Parameter:
        """Say that one more layer uses the weight: its gradient is complete after one more addition."""
        self._extra_uses[weight] += 1
        return weight

    @property
    def is_deferring(self) -> bool:
        """Whether additions are being put off."""
        return self._deferring_to is not None

    @contextmanager
    def defer(self, pass_: Hashable) -> Iterator[None]:
        """Put off the additions of the backward pass inside, until `run` is called with the same name."""
        assert self._deferring_to is None
        self._deferring_to = self._deferred.setdefault(pass_, [])
        try:
            yield
        finally:
            self._deferring_to = None

    @torch.no_grad()
    def run_deferred(self, pass_: Hashable) -> None:
        """Make the additions that were put off under this name."""
        for addition in self._deferred.pop(pass_):
            addition()

    def accumulate(self, weight: nn.Parameter, x_TI: Callable[[], Tensor], grad_TO: Tensor) -> Tensor | None:
        """Add gradᵀ x, now or later.

        Args:
            x_TI: gives the layer's input, whole; called once, when the product is made.

        Returns:
            what autograd is to have as the weight's gradient: None, unless the weight has no main gradient.
        """
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            return grad_TO.t() @ x_TI()
        self._run_or_defer(weight, lambda: self.accumulate_product(main_grad(), grad_TO, x_TI()))
        return None

    def accumulate_product(
        self, main_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool = False
    ) -> None:
        """main += gradᵀ x in float32, whatever the two are.

        Args:
            first: nothing was added before: main may hold anything.
        """
        self._product(main_OI, grad_TO, x_TI, first=first, rounded=not self.fused)

    def main_grad(self, weight: nn.Parameter) -> Tensor | None:
        """The main gradient of a weight, None where autograd has its gradients.

        Who adds to it calls `added` when the gradient of one pass is complete.
        """
        main_grad = self._main_grads.get(weight)
        return None if main_grad is None else main_grad()

    def accumulate_with(self, weight: nn.Parameter, addition: Callable[[Tensor], object]) -> Tensor | None:
        """Let `addition` add to a float32 tensor of the weight's shape; as `add` otherwise."""
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            grad = torch.zeros_like(weight, dtype=torch.float32)
            addition(grad)
            return grad.to(weight.dtype)
        self._run_or_defer(weight, lambda: addition(main_grad()))
        return None

    def accumulate_rows(self, weight: nn.Parameter, row_T: Tensor, grad_TD: Tensor) -> Tensor | None:
        """Add grad[t] to row `row_T[t]`, for every t; as `add` otherwise."""
        main_grad = self._main_grads.get(weight)
        if main_grad is None:
            return torch.ops.aten.embedding_dense_backward(grad_TD, row_T, weight.shape[0], -1, False)
        # on a GPU index_add_ adds in any order, index_put_ sorts: the same bits every time
        if weight.device.type == "cpu":
            self._run_or_defer(weight, lambda: main_grad().index_add_(0, row_T, grad_TD.float()))
        else:
            self._run_or_defer(
                weight, lambda: main_grad().index_put_((row_T,), grad_TD.float(), accumulate=True)
            )
        return None

    def accumulate_scaled(self, weight: nn.Parameter, grad: Tensor, scale: Tensor) -> Tensor | None:
        """Add what is there already, `scale` times (a number); as `add` otherwise, but never put off: it
        would only be kept for longer.

        Args:
            made: float32, of the weight's shape.
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
        """Say that one use of the weight has added its gradient of one pass."""
        self._accumulations[weight] += 1
        if (
            self.on_grad_ready is not None
            and self._accumulations[weight] % (1 + self._extra_uses[weight]) == 0
        ):
            self.on_grad_ready(weight)
