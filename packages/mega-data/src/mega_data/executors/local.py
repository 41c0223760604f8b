"""Tasks on processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_data.executors.pool import TaskPool
from mega_data.task_stages import Progress, Result, Stage, left, perform, results, silent


def run(
    stages: Sequence[Stage], folder: Path, *, workers: int, progress: Progress = silent
) -> list[list[Result]]:
    """Do every task of every stage that is not done; what is remembered of each, by stage and task.

    Raises:
        MegaError: a task's own error, or a worker that was killed. What is done stays done.
    """
    workers = min(workers, max((len(stage.mine) for stage in stages), default=0))
    if workers <= 1:
        for stage in stages:
            tasks = left(stage, folder)
            tell = progress(stage, tasks)
            for task in tasks:
                tell(perform(stage, task, folder))
        return [results(stage, folder) for stage in stages]
    with TaskPool(stages, folder, workers) as pool:
        for stage in stages:
            tasks = left(stage, folder)
            tell = progress(stage, tasks)
            for result in pool.run(stage, tasks):
                tell(result)
    return [results(stage, folder) for stage in stages]
