"""Arithmetic that gives the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from mega_schema.errors import ConfigError

# NCCL's, whose sums do not depend on when messages arrive; Megatron's list
_DETERMINISTIC_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def check_nccl_algorithm(environment: Mapping[str, str]) -> None:
    """That NCCL adds up in one order.

    Raises:
        ConfigError: it was not told to.
    """
    algorithm = environment.get("NCCL_ALGO")
    if algorithm not in _DETERMINISTIC_ALGORITHMS:
        raise ConfigError(
            "--deterministic-mode",
            "NCCL may choose how it adds up",
            found="no NCCL_ALGO" if algorithm is None else f"NCCL_ALGO={algorithm}",
            wanted=" | ".join(_DETERMINISTIC_ALGORITHMS),
            hint="NCCL_ALGO=Ring before torchrun",
        )


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Where it is wanted, torch uses algorithms that repeat bit for bit, and refuses what it has none for.

    Torch has this for a process only; it is put back.
    """
    if not enabled:
        yield
        return
    previous = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it with its first product
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous)
