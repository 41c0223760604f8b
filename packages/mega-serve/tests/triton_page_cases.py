"""The Triton kernels over pages, run by Triton's interpreter on the CPU, held against `TorchPages`.

Triton asks for TRITON_INTERPRET as it is imported: `test_device_pages` runs these in a process of their own.
"""

from __future__ import annotations

import pytest
import torch

from mega_serve.execution import triton_attention
from mega_serve.execution.triton_pages import TritonPages
from tests.serving.paged_steps import SHAPES, TwoPools, largest_difference, new_pages


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_and_generation_attend_as_torch(name: str) -> None:
    shape = SHAPES[name]
    assert largest_difference(TwoPools(new_pages(TritonPages, shape), shape, seed=3), steps=1) < 1e-5


@pytest.mark.parametrize("processors", [1, 128])
def test_the_number_of_splits_changes_nothing(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one part of the keys to more parts than there are blocks of keys."""
    monkeypatch.setattr("mega_serve.execution.triton_pages._INTERPRETER_PROCESSORS", processors)
    shape = SHAPES["window"]
    assert largest_difference(TwoPools(new_pages(TritonPages, shape), shape, seed=4), steps=1) < 1e-5


def test_keys_and_values_in_half_precision_differ_by_its_rounding() -> None:
    """The interpreter has no products of bfloat16."""
    shape = SHAPES["grouped"]
    pages = new_pages(TritonPages, shape, dtype=torch.float16)
    two = TwoPools(pages, shape, seed=5, dtype=torch.float16)
    assert largest_difference(two, steps=1) < 8 * torch.finfo(torch.float16).eps


def test_the_interpreter_ran() -> None:
    """On a machine with a GPU, compiled kernels would read CPU tensors otherwise."""
    assert type(triton_attention._attend_kernel).__name__ == "InterpretedFunction"
