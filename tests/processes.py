"""Run other programs, one process per rank, because they warn, fork, print and keep global state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tests import fork_server

SECONDS = 300.0  # a rank that waits for one that failed


def on_ranks(
    module: str,
    words: Sequence[str],
    ranks: int,
    folder: Path,
    imports: tuple[str, ...] = fork_server.TRAINER,
) -> None:
    """Run `python -m module words` on every rank, with RANK and WORLD_SIZE set, and wait for all.

    Args:
        folder: for what they print.
        imports: modules that the warm process has imported.

    Raises:
        AssertionError: a rank failed; the text is what it printed.
    """
    with contextlib.ExitStack() as stack:
        logs = [
            stack.enter_context((folder / f"rank{rank}.txt").open("w+", encoding="utf-8"))
            for rank in range(ranks)
        ]
        programs = [
            fork_server.start(
                module,
                words,
                imports=imports,
                stdout=log.fileno(),
                stderr=log.fileno(),
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [program.wait(SECONDS) for program in programs]
        finally:
            for program in programs:
                program.kill()
                program.wait()
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            log.seek(0)
            assert code == 0, f"rank {rank} of {module} {words[0]}\n{log.read()[-6000:]}"
