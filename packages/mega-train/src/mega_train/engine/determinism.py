"""Deterministic mode: bitwise reproducible arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from mega_schema.errors import ConfigError

# NCCL algorithms whose sums do not depend on arrival times; Megatron's list
_DETERMINISTIC_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def check_nccl_algorithm(environment: Mapping[str, str]) -> None:
    """Check that NCCL reduces in a fixed order.

    Raises:
        ConfigError: NCCL_ALGO does not fix the order.
    """
    algorithm = environment.get("NCCL_ALGO")
    if algorithm not in _DETERMINISTIC_ALGORITHMS:
        raise ConfigError(
            "--deterministic-mode",
            "NCCL's order of summation is not fixed",
            found="no NCCL_ALGO" if algorithm is None else f"NCCL_ALGO={algorithm}",
            wanted=" | ".join(_DETERMINISTIC_ALGORITHMS),
            hint="NCCL_ALGO=Ring before torchrun",
        )


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms, and refuse operations without one.

    The setting is process-wide in torch; the previous one is restored.
    """
    if not enabled:
        yield
        return
    previous = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its first product
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous)
