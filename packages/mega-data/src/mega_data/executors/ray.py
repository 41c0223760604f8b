"""Run tasks on a Ray cluster: the one that RAY_ADDRESS names, or a local one.

As with Slurm, all nodes must see the inputs, the output and the work folder under the same paths, and have
the libraries that the command needs. The code of mega_data is sent with the run.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from mega_data.task_stages import (
    StartProgress,
    TaskResult,
    TaskStage,
    no_progress,
    pending_tasks,
    read_results,
    run_task,
)
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, MegaError

_WAITED = 64  # tasks whose end is waited for at a time
_CONNECT_SECONDS = 10.0  # to wait for a cluster to answer
_MAX_WAITING = 1000  # tasks that Ray has at a time: waiting for one takes longer, the more they are
_HINT = "run the same command again to resume"


def run(
    stages: Sequence[TaskStage], folder: Path, *, workers: int, progress: StartProgress = no_progress
) -> list[list[TaskResult]]:
    """Run every unfinished task of every stage; return the results by stage and task.

    A task whose process dies is retried up to three times (Ray's default).

    Args:
        workers: processes, if Ray is started for this run; an existing cluster has its own.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
        MegaError: a task's own error, or its process died each time. Finished tasks stay finished.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here would report usage
    try:
        ray: Any = import_module("ray")
    except ImportError:
        hint = install_hint("mega-data", "ray")
        raise ConfigError("--executor", "ray is not installed", hint=hint) from None
    folder = folder.resolve()
    _connect(ray, workers)
    try:
        for stage in stages:
            _run_stage(ray, stage, folder, progress)
    finally:
        ray.shutdown()
    return [read_results(stage, folder) for stage in stages]


def _connect(ray: Any, workers: int) -> None:
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
    if address:
        code = [str(Path(str(import_module(name).__file__)).parent) for name in ("mega_data", "mega_schema")]
        options = {"runtime_env": {"py_modules": code}}
    try:
        host, colon, port = (address or "").partition(":")
        if colon and port.isdecimal():  # Ray itself retries for minutes
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
    except (OSError, RuntimeError, ValueError) as error:  # no cluster, or one of other versions
        found, hint = f"{address}: {' '.join(str(error).split())}", "ray start --head, or unset RAY_ADDRESS"
        raise ConfigError("RAY_ADDRESS", "no cluster to use", found=found, hint=hint) from None


def _run_task(pickled_stage: bytes, task: int, folder: Path, cwd: Path) -> TaskResult:
    os.chdir(cwd)  # paths may be relative
    return run_task(_open_stage(pickled_stage), task, folder)


@lru_cache(maxsize=1)
def _open_stage(pickled: bytes) -> TaskStage:
    """Open a stage once in a process: Ray would do it for every task, 0.1 s with 10,000 inputs."""
    stage: TaskStage = pickle.loads(pickled)
    return stage


def _run_stage(ray: Any, stage: TaskStage, folder: Path, progress: StartProgress) -> None:
    tasks = pending_tasks(stage, folder)
    report = progress(stage, tasks)
    remote = ray.remote(_run_task)
    shared = ray.put(pickle.dumps(stage))
    left = iter(tasks)
    waiting: list[Any] = []
    while True:
        more = islice(left, _MAX_WAITING - len(waiting))
        waiting += [remote.remote(shared, task, folder, Path.cwd()) for task in more]
        if not waiting:
            return
        # of all tasks, each call would look at thousands
        ended, others = ray.wait(waiting[:_WAITED])
        waiting = [*others, *waiting[_WAITED:]]
        try:
            report(ray.get(ended[0]))
        except ray.exceptions.RayTaskError as error:
            for task in waiting:
                ray.cancel(task)
            cause = error.cause
            raise (cause if isinstance(cause, MegaError) else error) from None
        except ray.exceptions.RayError as error:
            what, found = f"Ray lost a task of {stage.name}", str(error).partition("\n")[0]
            raise MegaError("--executor", what, found=found, hint=_HINT) from None
