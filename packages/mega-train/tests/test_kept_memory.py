"""What a training process asks of the system's memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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


def test_large_tensors_of_a_run_lie_in_large_pages_and_what_they_free_serves_again(corpus: Path) -> None:
    if not PAGES.is_file() or "[never]" in PAGES.read_text():
        pytest.skip(f"this system gives no large pages ({PAGES})")
    model = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
    course = ["--train-iters", "1", "--lr", "0.02", "--eval-iters", "0", "--global-batch-size", "1"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, "gpt", "--data-path", str(corpus), *model, *course],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"},
    )
    assert done.returncode == 0, done.stderr
    first, *again = map(int, done.stdout.splitlines()[-32:])
    assert first < (1 << 27) // 4096 / 4, "128 MiB are 32,768 pages of 4 KiB, or 64 large ones"
    # The first few may take new memory: glibc 2.36 keeps what aligning a tensor cut off, seven small blocks
    # of a size at most, and without it the tensor's own block is too short for the next one.
    assert statistics.median(again) < 32, "128 MiB that were given back are 64 faults or more"
