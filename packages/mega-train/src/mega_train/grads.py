"""Gradients in one contiguous float32 buffer: added up, reduced over ranks, measured and clipped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from mega_model.mesh import Mesh
from mega_schema.params import Param
from mega_train.repeated import add_up, answered


class Gradients:
    """The float32 gradients of one rank's parameters.

    Backward adds to them as each parameter's gradient is ready, whatever the parameter's dtype, and the
    parameter keeps none of its own (Megatron's --accumulate-allreduce-grads-in-fp32).

    Attributes:
        of: the gradient of each parameter, in the order given; views of one buffer.
    """

    def __init__(
        self, held: Sequence[tuple[Param, nn.Parameter]], mesh: Mesh, shared: Collection[str] = ()
    ) -> None:
        """
        Args:
            shared: names of parameters that one on another pipeline stage is tied to.
        """
        self.mesh, self.rows, self.shared = mesh, [row for row, _ in held], shared
        weights = [weight for _, weight in held]
        self.flat = torch.zeros(sum(w.numel() for w in weights), device=mesh.device)
        parts = self.flat.split([w.numel() for w in weights])
        self.of = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
        for weight, gradient in zip(weights, self.of, strict=True):
            weight.register_post_accumulate_grad_hook(_add_to(gradient))

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, scale: float = 1.0) -> None:
        """Make them the whole batch's: mean over replicas, then sums over tp and pp where ranks share work.

        In this order (Megatron's), since a sum over many ranks adds up in an order that depends on where in
        the buffer a gradient lies: what several ranks hold alike is made alike by the last sum.

        Args:
            scale: what the loss was multiplied by; they are divided by it.
        """
        self.mesh.replicas.reduce(self.flat)
        if (parts := self.mesh.replicas.size * scale) != 1:
            self.flat.div_(parts)
        if self.mesh.tp.sequence:
            # outside the tensor-parallel regions a rank saw its own tokens only
            whole = [g for row, g in zip(self.rows, self.of, strict=True) if row.split is None]
            together = self.mesh.tp.reduce(torch.cat([g.flatten() for g in whole]))
            for gradient, total in zip(whole, together.split([g.numel() for g in whole]), strict=True):
                gradient.copy_(total.view_as(gradient))
        add_up(self._stretches(), self.mesh.tp)
        self._tie()

    def norm(self) -> float:
        """Global L2 norm, every element of every parameter counted on one rank."""
        owned = answered(self._stretches(), self.mesh.tp)
        square = torch.stack([g.square().sum() for g in owned]).sum() if owned else self.flat.new_zeros(())
        return float(self.mesh.pp.reduce(self.mesh.tp.reduce(square)).sqrt())

    def first_non_finite(self) -> str:
        """The parameter whose gradient was the first to be not finite, in the order of the backward pass."""
        for row, gradient in zip(reversed(self.rows), reversed(self.of), strict=True):
            if not gradient.isfinite().all():
                return row.name
        return "no parameter"

    def clip(self, norm: float, most: float) -> None:
        """Scale down so that the norm is at most `most`; Megatron's coefficient, with its 1e-6."""
        if most > 0 and (scale := most / (norm + 1e-6)) < 1:
            self.flat.mul_(scale)

    def _stretches(self) -> list[tuple[Param, int, Tensor]]:
        return [(row, 0, g.view(-1)) for row, g in zip(self.rows, self.of, strict=True)]

    def _tie(self) -> None:
        """Add the two gradients of a parameter that the first stage reads and the last stage scores with."""
        pp = self.mesh.pp
        if pp.size == 1:
            return
        for row, gradient in zip(self.rows, self.of, strict=True):
            if (row.tied_to or row.name) in self.shared:
                other, end = torch.empty_like(gradient), pp.size - 1 - pp.rank
                pp.exchange([(gradient, end)], [(other, end)])
                gradient.add_(other)


def _add_to(gradient: Tensor) -> Callable[[Tensor], None]:
    def hook(weight: Tensor) -> None:
        if weight.grad is not None:  # a linear layer has added its own already: mega_model.weight_gradients
            gradient.add_(weight.grad)
            weight.grad = None

    return hook
