"""Tasks on a Ray cluster: the one that RAY_ADDRESS names, or processes of this machine under Ray.

The workers must see the inputs, the output and the work folder under the same paths, as Slurm's nodes must.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mega_data.steps import Progress, Result, Stage, left, perform, results, silent
from mega_schema.errors import ConfigError, MegaError

_HINT = "the same command goes on where this one ended"


def run(
    stages: Sequence[Stage], folder: Path, *, workers: int, progress: Progress = silent
) -> list[list[Result]]:
    """Do every task of every stage that is not done; what is remembered of each, by stage and task.

    A task whose process dies is given to another one, three times (Ray's default).

    Args:
        workers: processes, where Ray is started for this run; an existing cluster has its own.

    Raises:
        ConfigError: Ray is not installed.
        MegaError: a task's own error, or its process died each time. What is done stays done.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else a cluster started here reports home
    try:
        ray: Any = import_module("ray")
    except ImportError:
        hint = "pip install 'mega-data[ray]'"
        raise ConfigError("--executor", "ray is not installed", hint=hint) from None
    folder = folder.resolve()
    ours = not ray.is_initialized()
    if ours:
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **local)
    try:
        for stage in stages:
            _run_stage(ray, stage, folder, progress)
    finally:
        if ours:
            ray.shutdown()
    return [results(stage, folder) for stage in stages]


def _run_stage(ray: Any, stage: Stage, folder: Path, progress: Progress) -> None:
    tasks = left(stage, folder)
    tell = progress(stage, tasks)
    remote, shared = ray.remote(perform), ray.put(stage)
    waiting = [remote.remote(shared, task, folder) for task in tasks]
    while waiting:
        ended, waiting = ray.wait(waiting)
        try:
            tell(ray.get(ended[0]))
        except ray.exceptions.RayTaskError as error:
            for task in waiting:
                ray.cancel(task)
            cause = error.cause
            raise (cause if isinstance(cause, MegaError) else error) from None
        except ray.exceptions.RayError as error:
            found = str(error).splitlines()[0]
            raise MegaError(
                "--executor", f"Ray lost a task of {stage.name}", found=found, hint=_HINT
            ) from None
