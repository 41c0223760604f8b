"""The tests of `interpreted`, in a process in which Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ARGUMENTS = ["-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={HERE.parents[2]}"]


def test_every_triton_kernel_is_its_definition() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *ARGUMENTS, HERE / "interpreted.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout[-300:]
