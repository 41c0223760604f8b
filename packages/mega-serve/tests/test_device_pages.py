"""Attention over pages on devices: every way gives the results of `TorchPages`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mega_serve.execution.attention_choice import BackendName, default_page_size, pages_class
from mega_serve.execution.flash_pages import FlashPages
from mega_serve.execution.flex_pages import FlexPages
from mega_serve.execution.paged_attention import TorchPages
from tests.serving import documented_flash_attn
from tests.serving.paged_steps import SHAPES, TwoPools, largest_difference, new_pages

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device to compare with a CPU")
ARGUMENTS = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={HERE.parents[2]}"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_decode_step_of_static_inputs_attends_as_a_step_of_chunks(name: str) -> None:
    shape = SHAPES[name]
    assert largest_difference(TwoPools(new_pages(TorchPages, shape), shape, seed=2), steps=6) < 1e-5


@pytest.mark.parametrize("cases", ["window or interpreter", pytest.param("", marks=pytest.mark.long)])
def test_triton_attends_as_torch(cases: str) -> None:
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *ARGUMENTS, "-k", cases, HERE / "triton_page_cases.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-1000:]
    assert re.search(r"^\d+ passed\b", process.stdout, re.MULTILINE), process.stdout[-300:]


@pytest.mark.parametrize("name", SHAPES)
def test_flex_attention_attends_as_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, without dynamo: FlexAttention's definition of a mask and a score function."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    shape = SHAPES[name]
    assert largest_difference(TwoPools(new_pages(FlexPages, shape), shape, seed=6), steps=4) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_flash_attn_is_called_with_what_it_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", documented_flash_attn)
    shape = SHAPES[name]
    assert largest_difference(TwoPools(new_pages(FlashPages, shape), shape, seed=7), steps=4) < 1e-5


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("name", SHAPES)
def test_triton_on_a_gpu_attends_as_torch_on_a_cpu(name: str) -> None:
    from mega_serve.execution.triton_pages import TritonPages

    shape = SHAPES[name]
    pages = new_pages(TritonPages, shape, "cuda")
    assert largest_difference(TwoPools(pages, shape, seed=3, device="cuda"), steps=6) < 1e-5


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("kind", ["triton", "flash", "flex"])
@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_on_a_gpu_differs_from_a_cpu_by_its_rounding(name: str, kind: BackendName) -> None:
    if kind == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    shape = replace(SHAPES[name], page_size=default_page_size(kind))
    pages = new_pages(pages_class(kind), shape, "cuda", torch.bfloat16)
    two = TwoPools(pages, shape, seed=5, device="cuda", dtype=torch.bfloat16)
    assert largest_difference(two, steps=2) < 8 * torch.finfo(torch.bfloat16).eps
