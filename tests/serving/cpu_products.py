"""A mark of tests that need instructions which some CPUs lack."""

from __future__ import annotations

import pytest
import torch

from mega_model.matmul_precision import has_native

needs_int8 = pytest.mark.skipif(
    not has_native(torch.bfloat16), reason="this CPU has no products of 8-bit integers"
)
