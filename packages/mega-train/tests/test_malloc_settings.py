"""malloc settings of a training process."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import resource, sys, torch
from mega_train.cli import main
try:
    main(sys.argv[1:])
except SystemExit as left:
    assert left.code == 0, left
for _ in range(32):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 25)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_large_tensors_of_a_run_free_serves_again(corpus: Path) -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("this C library has no such setting")
    model = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
    training = ["--train-iters", "1", "--lr", "0.02", "--eval-iters", "0", "--global-batch-size", "1"]
    command = [sys.executable, "-c", RUN, "gpt", "--data-path", str(corpus), *model, *training]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    _, *later_faults = map(int, process.stdout.splitlines()[-32:])
    # The first few may take new memory: glibc 2.36 keeps what aligning a tensor cut off, seven small blocks
    # of a size at most, and without it the tensor's own block is too short for the next one.
    assert statistics.median(later_faults) < 32, "128 MiB that were given back are 32,768 faults"
