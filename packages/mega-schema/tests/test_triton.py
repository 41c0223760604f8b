"""The tests of the files called interpreted, in a process in which Triton interprets."""

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


def test_every_triton_kernel_is_its_definition() -> None:
    _interpreted("interpreted.py")


def test_every_kernel_of_ligers_is_the_definition() -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger_kernel is not installed: pip install -r requirements-test.txt")
    _interpreted("interpreted_liger.py")


def _interpreted(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *ARGUMENTS, HERE / file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout[-300:]
