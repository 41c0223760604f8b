"""Marks of tests that need instructions which some CPUs lack."""

from __future__ import annotations

import pytest
import torch

from mega_model.matmul_precision import has_native

_LACKS_PRODUCTS = not has_native(torch.bfloat16)

needs_int8 = pytest.mark.skipif(_LACKS_PRODUCTS, reason="this CPU has no products of 8-bit integers")
needs_bf16 = pytest.mark.skipif(_LACKS_PRODUCTS, reason="this CPU has no products of bfloat16")
# dtypes of batch-invariant models
INVARIANT_DTYPES = ["float32", pytest.param("bfloat16", marks=needs_bf16)]
