"""One way to run stages for every command: here, as an element of a Slurm array, or on Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mega_data.executors import local, slurm
from mega_data.task_stages import Progress, Result, Stage, chosen, silent

EXECUTORS = ("local", "slurm-array", "ray")


def execute(
    stages: Sequence[Stage],
    folder: Path,
    *,
    executor: str = "local",
    workers: int = 1,
    only: str | None = None,
    environment: Mapping[str, str],
    progress: Progress = silent,
) -> list[list[Result]] | None:
    """Do the tasks that are not done.

    Args:
        executor: one of EXECUTORS.
        only: `plan`, STAGE or STAGE:TASK, as the flag.
        environment: the process's; `slurm-array` finds its place in it.

    Returns:
        what is remembered of every task, by stage and task; None where this process had only a part to do.

    Raises:
        MegaError: as the executor does.
    """
    wanted = chosen(stages, only)
    if executor == "ray":
        from mega_data.executors.ray import run

        found = run(wanted, folder, workers=workers, progress=progress)
    elif executor == "slurm-array":
        found = local.run(slurm.shares(wanted, environment), folder, workers=workers, progress=progress)
    else:
        found = local.run(wanted, folder, workers=workers, progress=progress)
    return found if only is None and executor != "slurm-array" else None
