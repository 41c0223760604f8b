"""Shared fixtures of this package's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mega_model.distributed.mesh import AsyncTensor


class _Threads:
    """A rank of an axis whose ranks are threads of this process, with the methods that the loss uses."""

    def __init__(self, rank: int, meet: threading.Barrier, slots: list[torch.Tensor]) -> None:
        self.rank, self.size, self.meet, self.slots = rank, meet.parties, meet, slots

    def reduce(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        self.slots[self.rank] = x
        self.meet.wait()
        together = torch.stack(self.slots)
        self.meet.wait()
        return x.copy_(together.sum(0) if how == "sum" else together.amax(0))

    def enter(self, x: torch.Tensor) -> AsyncTensor:
        return AsyncTensor(x)

    def leave(self, x: torch.Tensor) -> AsyncTensor:
        return AsyncTensor(self.reduce(x))


@pytest.fixture
def axes() -> Callable[[int], Sequence[Any]]:
    """Makes the ranks of an axis of this size; each is for a thread of its own."""

    def make_axes(size: int) -> Sequence[Any]:
        meet, slots = threading.Barrier(size, timeout=60), [torch.empty(0)] * size
        return [_Threads(rank, meet, slots) for rank in range(size)]

    return make_axes
