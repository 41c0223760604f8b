"""Liger's own kernels behind our adapters, run by Triton's interpreter on the CPU.

The interpreter lacks two things that a compiled kernel has: a float that is given becomes a tensor, and
libdevice has a body. It has no arithmetic of bfloat16 either. `test_triton` runs these in a process of their
own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from liger_kernel.ops import layer_norm, rms_norm
from triton.runtime import interpreter

from mega_model.kernels import REFERENCE, third_party
from mega_model.kernels.verify import check_kernels

CPU = torch.device("cpu")


@triton.jit
def rsqrt(x):
    return tl.math.rsqrt(x)


@pytest.fixture(autouse=True)
def compile_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = interpreter._implicit_cvt

    def convert_value(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_value)
    monkeypatch.setattr(layer_norm, "rsqrt", rsqrt)
    monkeypatch.setattr(rms_norm, "rsqrt", rsqrt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ligers_kernels_are_the_definitions(dtype: torch.dtype) -> None:
    part = dict(third_party.liger())
    results = [check for check in check_kernels(replace(REFERENCE, **part), CPU, dtype) if check.name in part]
    assert {check.name: check.failure or check.error for check in results if not check.ok} == {}
    assert {check.name for check in results} == set(part)


def test_ligers_swiglu_leaves_a_single_row_as_it_is() -> None:
    x_TF = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    third_party.liger()["swiglu"](x_TF).sum().backward()
    assert x_TF.tolist() == [[1.0, 2.0, 3.0, 4.0]]
