"""Matrix products of a linear layer: its output, and its weight gradient added to a float32 sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.matmul_precision import allow_bf16_matmul, matmul_dtype

_CHUNK_GRADIENT = 1 << 20  # numbers of a gradient that a CPU converts at once: 4 MiB of cache
_CHUNK_PRODUCT = 1 << 22  # numbers of a product that are computed before they are added


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b in the dtype of x. Backward calls it with the transposed weight.

    A CPU converts the factors to the dtype it computes in, except for a single token, which is faster
    unconverted.
    """
    if matmul_dtype(x_TI) == x_TI.dtype or x_TI.shape[0] == 1:
        return F.linear(x_TI, weight_OI, bias_O)
    bias_O = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), weight_OI.float(), bias_O).to(x_TI.dtype)


@torch.no_grad()
def add_product(main_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool, rounded: bool) -> None:
    """Compute main += gradᵀ x, or main = gradᵀ x.

    Args:
        main_OI: float32, or of the factors' dtype.
        grad_TO, x_TI: of one dtype.
        first: overwrite main, which may hold anything.
        rounded: round the product to the dtype of its factors before it is added.
    """
    beta = 0 if first else 1
    if grad_TO.dtype == main_OI.dtype:
        main_OI.addmm_(grad_TO.t(), x_TI, beta=beta)
    elif rounded:
        dtype = matmul_dtype(x_TI)
        for main, grad in _row_chunks(main_OI, grad_TO, _CHUNK_PRODUCT // max(1, x_TI.shape[1])):
            product = (grad.t().to(dtype) @ x_TI.to(dtype)).to(grad_TO.dtype)
            main.copy_(product) if first else main.add_(product)
    elif grad_TO.is_cuda:
        torch.addmm(main_OI, grad_TO.t(), x_TI, beta=beta, out_dtype=torch.float32, out=main_OI)
    else:
        tokens = len(grad_TO)
        x_TI = x_TI.float()
        step = min(grad_TO.shape[1], max(1, _CHUNK_GRADIENT // max(1, tokens)))
        float_TO = x_TI.new_empty(tokens * step)  # one buffer for all chunks
        with allow_bf16_matmul(grad_TO.dtype):
            for main, grad in _row_chunks(main_OI, grad_TO, step):
                grad = float_TO[: grad.numel()].view(grad.shape).copy_(grad)
                main.addmm_(grad.t(), x_TI, beta=beta)


def _row_chunks(main_OI: Tensor, grad_TO: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, rows)
    return zip(main_OI.split(rows), grad_TO.split(rows, 1), strict=True)
