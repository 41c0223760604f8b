"""Rounding between floating-point widths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_ckpt.tensors.dtypes import FLOATS, cast
from mega_schema.errors import FormatError

SINGLE = st.floats(width=32, allow_nan=False)


def _bfloat16_value(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


@given(SINGLE.filter(lambda x: abs(x) < 3e38))
def test_bfloat16_is_the_nearest_and_even_when_two_are_as_near(number: float) -> None:
    bits = int(cast(np.array([number], np.float32), "F32", "BF16", "x")[0])
    distance = abs(_bfloat16_value(bits) - number)
    for near in {max(bits - 1, bits & 0x8000), min(bits + 1, (bits & 0x8000) + 0x7F7F)} - {bits}:
        neighbour_distance = abs(_bfloat16_value(near) - number)
        assert distance < neighbour_distance or (distance == neighbour_distance and bits % 2 == 0)


def test_a_number_halfway_between_two_goes_to_the_even_one() -> None:
    below = np.arange(0x7F7F, dtype=np.uint32)  # every finite bfloat16 from 0 that has a finite one above
    halfway = (below << 16 | 0x8000).view(np.float32)
    assert np.array_equal(cast(halfway, "F32", "BF16", "x"), below + below % 2)
    assert np.array_equal(cast(-halfway, "F32", "BF16", "x"), (below + below % 2) | 0x8000)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_dtype_is_handed_back_untouched(dtype: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    assert cast(bits, dtype, dtype, "x") is bits


def test_every_bfloat16_survives_float32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    back = cast(cast(bits, "BF16", "F32", "x"), "F32", "BF16", "x")
    number = cast(bits, "BF16", "F32", "x")
    assert np.array_equal(back[~np.isnan(number)], bits[~np.isnan(number)])
    assert np.isnan(cast(back, "BF16", "F32", "x")[np.isnan(number)]).all()


def test_a_nan_whose_bits_are_all_low_stays_a_nan() -> None:
    number = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(cast(cast(number, "F32", "BF16", "x"), "BF16", "F32", "x")).all()


def test_infinities_stay_and_finite_numbers_do_not_become_them() -> None:
    endless = np.array([np.inf, -np.inf], np.float32)
    for dtype in ("BF16", "F16"):
        assert np.array_equal(cast(cast(endless, "F32", dtype, "x"), dtype, "F32", "x"), endless)
        with pytest.raises(FormatError, match=f"x: too large for {dtype}"):
            cast(np.array([3.4e38], np.float32), "F32", dtype, "x")
