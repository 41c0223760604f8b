"""A mark of tests that need instructions which some CPUs lack."""

from __future__ import annotations

import pytest

from mega_model.matmul_precision import has_int8_products

needs_int8 = pytest.mark.skipif(
    not has_int8_products(), reason="oneDNN's products of 8-bit integers overflow on this CPU"
)
