"""In which precision a product of half-precision factors is made, where a CPU makes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """What products of x are made in.

    A CPU without instructions for a half precision takes seven to thirty times as long for it as for float32
    (bench/cpu_training.py).
    """
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    return torch.float32 if half and not has_native(x.dtype) else x.dtype


def has_native(half: torch.dtype) -> bool:
    """Whether torch has this CPU's own instructions for products of a half precision."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    return (ops._is_mkldnn_bf16_supported if half == torch.bfloat16 else ops._is_mkldnn_fp16_supported)()


@contextmanager
def allow_bf16_matmul(half: torch.dtype) -> Iterator[None]:
    """Inside, the factors of a CPU's float32 products are numbers of `half` precision.

    A CPU with its own products of bfloat16 then uses them: they are the float32 product but for the order of
    additions, in half the time (bench/cpu_training.py).
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # the module puts another in its place
    previous = settings.fp32_precision
    if half == torch.bfloat16 and has_native(half):
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = previous
