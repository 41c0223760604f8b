"""Norms and activations of rows by numba, against the reference kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mega_model.kernels import reference
from mega_model.kernels.numba import load_kernels
from mega_model.kernels.row_functions import RowFunctions

pytest.importorskip("numba", reason="numba is not installed")
activations = load_kernels().row_kernels  # not by its name: compiled code would be cached beside the source

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of values of magnitude 1: one rounding each


def _array(x: Tensor) -> np.ndarray:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _row(width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_equal_the_reference(dtype: torch.dtype, has_bias: bool) -> None:
    for width in (8, 64, 100):
        x, weight, bias = (_row(width, dtype, seed) for seed in range(3))
        out = torch.empty_like(x)
        bias = bias if has_bias else bias[:0]
        activations.norm_row(
            *map(_array, (x, weight, bias)),
            np.float32(1e-5),
            _array(out),
            np.zeros(activations.padded_width(width), np.float32),
        )
        if has_bias:
            expected = reference.layer_norm(x[None], weight, bias, 1e-5)[0]
        else:
            expected = reference.rms_norm(x[None], weight, 1e-5)[0]
        torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf", "swiglu"])
def test_activations_equal_the_reference(dtype: torch.dtype, name: str) -> None:
    for width in (16, 70):
        x, bias = _row(2 * width if name == "swiglu" else width, dtype), _row(width, dtype, 1)
        x[:6] = torch.tensor([0.0, -100.0, 100.0, -0.0, 1e-20, -12.0])
        bias = bias[:0] if name == "swiglu" else bias
        bias[:6] = 0.0
        out = torch.empty(width, dtype=dtype)
        number = getattr(activations, name.upper())
        row = np.zeros(activations.padded_width(width), np.float32)
        activations.activate_row(_array(x), _array(bias), number, _array(out), row)
        if name == "swiglu":
            expected = reference.swiglu(x)
        else:
            expected = reference.bias_gelu(x, bias, "tanh" if name == "gelu_tanh" else "none")
        torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_functions_of_many_rows_equal_the_reference(dtype: torch.dtype, threads: int) -> None:
    functions: Any = RowFunctions(SimpleNamespace(row_kernels=activations))  # type: ignore[arg-type]
    x, residual = (_row(7 * 70, dtype, seed).view(7, 70) for seed in (2, 3))
    scale, shift = (_row(70, dtype, seed) for seed in (4, 5))
    cases: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, scale, 1e-5),
        "layer_norm": (x, scale, shift, 1e-5),
        "add_rms_norm": (x, residual, scale, 1e-5),
        "add_layer_norm": (x, residual, scale, shift, 1e-5),
        "bias_gelu": (x, shift, "tanh"),
        "swiglu": (x,),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, arguments in cases.items():
            actual = getattr(functions, name)(*arguments)
            expected = getattr(reference, name)(*arguments)
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    finally:
        torch.set_num_threads(before)


def test_operands_of_other_shapes_are_refused() -> None:
    functions: Any = RowFunctions(SimpleNamespace(row_kernels=activations))  # type: ignore[arg-type]
    x = torch.ones(2, 8)
    for name, arguments in {
        "rms_norm": (x, x[0, :4], 1e-5),
        "layer_norm": (x, x[0], x[0, :4], 1e-5),
        "add_rms_norm": (x, x[:1], x[0], 1e-5),
        "bias_gelu": (x, x[0, :4], "tanh"),
        "swiglu": (x[:, :5],),
    }.items():
        with pytest.raises(AssertionError, match="a |two "):
            getattr(functions, name)(*arguments)
