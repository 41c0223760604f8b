"""Tasks on processes of this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

from mega_data.steps import Progress, Result, Stage, left, perform, results, silent
from mega_schema.errors import MegaError


def run(
    stages: Sequence[Stage], folder: Path, *, workers: int, progress: Progress = silent
) -> list[list[Result]]:
    """Do every task of every stage that is not done; what is remembered of each, by stage and task.

    Raises:
        MegaError: a task's own error, or a worker that was killed. What is done stays done.
    """
    if workers == 1 or max((len(stage.mine) for stage in stages), default=0) == 1:
        for stage in stages:
            tasks = left(stage, folder)
            tell = progress(stage, tasks)
            for task in tasks:
                tell(perform(stage, task, folder))
        return [results(stage, folder) for stage in stages]
    # spawn: a fork copies threads' locks in whatever state they are
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        for stage in stages:
            _run_stage(pool, stage, folder, progress)
    return [results(stage, folder) for stage in stages]


def _run_stage(pool: ProcessPoolExecutor, stage: Stage, folder: Path, progress: Progress) -> None:
    tasks = left(stage, folder)
    tell = progress(stage, tasks)
    futures = list[Future[Result]]()
    try:
        futures += [pool.submit(partial(perform, stage, task, folder)) for task in tasks]
        for future in as_completed(futures):
            tell(future.result())
    except BrokenProcessPool:
        hint = "the same command goes on where this one ended; fewer workers need less memory"
        raise MegaError("--workers", "a process was killed", found=stage.name, hint=hint) from None
    finally:
        for future in futures:
            future.cancel()


def _end_with_parent() -> None:
    """In a worker: end when who started it is killed, else it would write beside the run after that."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
