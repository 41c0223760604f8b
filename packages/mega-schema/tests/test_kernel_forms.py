"""The serial and the parallel form of each numba kernel, and the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from mega_model.kernels.numba import has_numba, load_kernels

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")


def test_no_two_kernels_share_a_file_of_compiled_code() -> None:
    files: dict[str, str] = {}
    kernels = load_kernels()
    for module in (getattr(kernels, field.name) for field in fields(kernels)):
        for name, kernel in vars(module).items():
            if getattr(kernel, "__module__", None) == module.__name__ and hasattr(kernel, "py_func"):
                base = kernel._cache._impl.filename_base
                assert files.setdefault(base, f"{module.__name__}.{name}") == f"{module.__name__}.{name}"
    assert len([name for name in files.values() if name.endswith("_parallel")]) > 10


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_leave_the_number_of_threads_as_it_was(threads: int) -> None:
    program = f"""
import torch
torch.set_num_threads({threads})
from mega_model.kernels.numba import as_array, load_kernels, run_kernel
x, weight = torch.randn(4, 32), torch.ones(32)
out = torch.empty_like(x)
arrays = map(as_array, (x, weight, weight[:0]))
run_kernel(load_kernels().row_kernels, "norm_rows", *arrays, 1e-5, as_array(out))
assert torch.get_num_threads() == {threads}, torch.get_num_threads()
torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (32,), weight, 1e-5))
"""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
