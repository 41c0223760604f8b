"""Run stages on the executor that a command names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mega_data.executors import local, slurm
from mega_data.task_stages import StartProgress, TaskResult, TaskStage, no_progress, select_stages

EXECUTORS = ("local", "slurm-array", "ray")


def execute(
    stages: Sequence[TaskStage],
    folder: Path,
    *,
    executor: str = "local",
    workers: int = 1,
    only: str | None = None,
    environment: Mapping[str, str],
    progress: StartProgress = no_progress,
) -> list[list[TaskResult]] | None:
    """Run the tasks that are not finished.

    Args:
        executor: one of EXECUTORS.
        only: `plan`, STAGE or STAGE:TASK, as the flag.
        environment: of the process; `slurm-array` reads its array index from it.

    Returns:
        The result of every task, by stage and task; None if this process ran only a part of them.

    Raises:
        MegaError: an error of the executor.
    """
    selected = select_stages(stages, only)
    if executor == "ray":
        from mega_data.executors.ray import run

        task_results = run(selected, folder, workers=workers, progress=progress)
    elif executor == "slurm-array":
        task_results = local.run(
            slurm.element_stages(selected, environment), folder, workers=workers, progress=progress
        )
    else:
        task_results = local.run(selected, folder, workers=workers, progress=progress)
    return task_results if only is None and executor != "slurm-array" else None
