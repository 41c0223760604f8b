"""Compile and load the C++ kernels, if the CPU has their instructions."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Final

import torch

from mega_schema import cpp_library
from mega_schema.cpp_library import CompileError

INSTRUCTIONS: Final = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16")
_FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp",
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16",
)  # fmt: skip


@cache
def load_kernels() -> ctypes.CDLL:
    """Return the compiled library; the first call on a machine compiles it in two seconds.

    Raises:
        CompileError: the CPU lacks the instructions, or as `cpp_library.load_library`.
    """
    capabilities: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    if platform.system() != "Linux" or not all(capabilities.get(name) for name in INSTRUCTIONS):
        raise CompileError("this CPU has no AVX-512 products of bfloat16")
    return cpp_library.load_library(os.path.dirname(__file__), _FLAGS)  # noqa: PTH120 - the model knows no files
