"""Writing, inspecting, verifying, merging and converting need memory for a chunk, not for the dataset."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_dataset_may_be_larger_than_memory(tmp_path):
    words = [sys.executable, Path(__file__).with_name("large_dataset.py"), tmp_path]
    process = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    for path in tmp_path.iterdir():  # a gigabyte that pytest would keep
        path.unlink()
    assert process.returncode == 0, process.stderr[-3000:]
