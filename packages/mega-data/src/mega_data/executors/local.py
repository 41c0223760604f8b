"""Run tasks on processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_data.executors.pool import TaskPool
from mega_data.task_stages import (
    StartProgress,
    TaskResult,
    TaskStage,
    no_progress,
    pending_tasks,
    read_results,
    run_task,
)


def run(
    stages: Sequence[TaskStage], folder: Path, *, workers: int, progress: StartProgress = no_progress
) -> list[list[TaskResult]]:
    """Run every unfinished task of every stage; return the results by stage and task.

    Raises:
        MegaError: a task's own error, or a killed worker. Finished tasks stay finished.
    """
    workers = min(workers, max((len(stage.own_tasks) for stage in stages), default=0))
    if workers <= 1:
        for stage in stages:
            tasks = pending_tasks(stage, folder)
            report = progress(stage, tasks)
            for task in tasks:
                report(run_task(stage, task, folder))
        return [read_results(stage, folder) for stage in stages]
    with TaskPool(stages, folder, workers) as pool:
        for stage in stages:
            tasks = pending_tasks(stage, folder)
            report = progress(stage, tasks)
            for result in pool.run(stage, tasks):
                report(result)
    return [read_results(stage, folder) for stage in stages]
