"""Kernels for CPUs that numba compiles: whether they can run here, and their modules."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_schema.app.install_hint import install_hint
from mega_schema.app.kernel_cache import private_cache
from mega_schema.errors import ConfigError

# in the order of the fields of NumbaKernels
_MODULES = (
    "page_attention", "linear", "ordered_product", "elementary",
    "projection", "row_kernels", "decoder_layers", "nucleus",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NumbaKernels:
    """The modules of compiled kernels, those of `_MODULES`."""

    attention: ModuleType
    linear: ModuleType
    ordered: ModuleType
    elementary: ModuleType
    projection: ModuleType
    row_kernels: ModuleType
    decoder_layers: ModuleType
    nucleus: ModuleType


def has_numba() -> bool:
    """Whether numba is installed (the extra `cpu`)."""
    return find_spec("numba") is not None


def load_kernels(cache: str | None = None, *, package: str = "mega-serve") -> NumbaKernels:
    """Return the numba kernels, with their compiled code cached in a private folder.

    A cached function is machine code that the next start runs, so nobody else may write to the folder.

    Args:
        cache: the folder; None takes `kernel_cache.default_cache()`.
        package: whose extra `cpu` an error tells to install.

    Raises:
        ConfigError: numba is not installed, or others can read or write the folder.
    """
    if not has_numba():
        raise ConfigError("numba", "is not installed", hint=install_hint(package, "cpu"))
    folder = private_cache(cache)
    numba = import_module("numba")
    numba.config.CACHE_DIR = folder
    # the default layer may be `workqueue`, which ends the process if two threads use it at once
    numba.config.THREADING_LAYER = "omp"
    return NumbaKernels(*(import_module(f"{__name__}.{name}") for name in _MODULES))


def run_kernel(module: ModuleType, name: str, *arguments: Any) -> None:
    """Call a kernel's form for torch's number of threads, `name`_serial or `name`_parallel."""
    threads = torch.get_num_threads()
    if threads == 1:
        getattr(module, f"{name}_serial")(*arguments, threads)
        return
    getattr(module, f"{name}_parallel")(*arguments, threads)
    if torch.get_num_threads() != threads:  # numba's first parallel kernel sets OpenMP's to all cores
        torch.set_num_threads(threads)


def as_array(x: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as numpy's; bfloat16 as its 16 bits."""
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
