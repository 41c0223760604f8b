"""Gradients of a kernel that has no backward: those of its definition, computed again from the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_gradient(
    kernel: Callable[..., Tensor], definition: Callable[..., Tensor], *inputs: Tensor
) -> Tensor:
    """Return kernel(*inputs), with the gradient of definition(*inputs).

    Args:
        kernel: computes without autograd.
        definition: the same function by differentiable operations, up to rounding.
    """
    if not torch.is_grad_enabled():
        return kernel(*inputs)
    apply: Callable[..., Tensor] = _KernelWithGradient.apply
    return apply(kernel, definition, *inputs)


class _KernelWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Tensor], definition: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.definition = definition
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(needs) for x, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.definition(*inputs)
        wanted = [x for x, needs in zip(inputs, needed, strict=True) if needs]
        grads = iter(torch.autograd.grad(output, wanted, grad))
        return None, None, *(next(grads) if needs else None for needs in needed)
