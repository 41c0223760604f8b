"""Run the *_kernel_cases.py tests in a process in which Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ARGUMENTS = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={HERE.parents[2]}"]


# of four whole models, which take most of the time, one of each family: one with dropout and one without
SHORT = "not dtype1 and not dtype2 and not gpt-0.0 and not llama-0.3"


@pytest.mark.parametrize("cases", [SHORT, pytest.param("", marks=pytest.mark.long)])
def test_every_triton_kernel_is_its_definition(cases: str) -> None:
    """In float32; the long one in bfloat16 and float16 too, and each model with dropout and without."""
    _run_interpreted("triton_kernel_cases.py", cases)


@pytest.mark.long
def test_every_kernel_of_ligers_is_the_definition() -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger_kernel is not installed: pip install -r requirements-test.txt")
    _run_interpreted("liger_kernel_cases.py", "")


def _run_interpreted(file: str, cases: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *ARGUMENTS, "-k", cases, HERE / file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-1000:]
    assert re.search(r"^\d+ passed\b", process.stdout, re.MULTILINE), process.stdout[-300:]
