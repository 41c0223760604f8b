"""Choose the dtype in which a CPU multiplies bf16/fp16 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to multiply x.

    A CPU without instructions for a half precision takes seven to thirty times as long as in float32
    (bench/cpu_optimizations.py).
    """
    half = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
    return torch.float32 if half and not has_native(x.dtype) else x.dtype


def has_native(half: torch.dtype) -> bool:
    """Whether torch uses this CPU's own instructions for products of a half precision."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    return (ops._is_mkldnn_bf16_supported if half == torch.bfloat16 else ops._is_mkldnn_fp16_supported)()


def has_int8_products() -> bool:
    """Whether oneDNN's products of 8-bit integers are exact on this CPU: without VNNI their sums overflow."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


@contextmanager
def allow_bf16_matmul(half: torch.dtype) -> Iterator[None]:
    """Within the context, promise that the factors of float32 products are exact in `half` precision.

    A CPU with bfloat16 instructions then uses them: the result is the float32 product up to the order of
    additions, in half the time (bench/cpu_optimizations.py).
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch replaces this module at import
    previous = settings.fp32_precision
    if half == torch.bfloat16 and has_native(half):
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = previous
