"""Runs other people's programs beside ours, a process per rank: they warn, fork, print and keep state."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 300.0  # a rank that waits for one that failed


def on_ranks(module: str, words: Sequence[str], ranks: int, folder: Path) -> None:
    """Run `python -m module words` once a rank, told which by RANK and WORLD_SIZE, and wait for all.

    Args:
        folder: for what they print.

    Raises:
        AssertionError: one failed; what it printed.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *words]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(ranks),
    }
    with contextlib.ExitStack() as stack:
        logs = [
            stack.enter_context((folder / f"rank{rank}.txt").open("w+", encoding="utf-8"))
            for rank in range(ranks)
        ]
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            log.seek(0)
            assert code == 0, f"rank {rank} of {module} {words[0]}\n{log.read()[-6000:]}"
