"""Worker processes for the tasks of stages: each receives the run once, then task numbers.

`concurrent.futures` sends the work with every task, which dominates the time of a run with many inputs, and
waits for running tasks when it is interrupted. This pool terminates processes that are no longer needed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Self

from mega_data.task_stages import TaskResult, TaskStage, run_task
from mega_data.worker_errors import portable_error
from mega_schema.errors import MegaError

TERMINATE_SECONDS = 1.0  # from SIGTERM to SIGKILL, for a worker to clean up


class TaskPool:
    """Processes that run the tasks of some stages.

    Args:
        stages: sent to each process when it starts.
        folder: work folder of the run.
    """

    def __init__(self, stages: Sequence[TaskStage], folder: Path, workers: int) -> None:
        self._stages = tuple(stages)
        self._processes = dict[Connection, Any]()
        # spawn: a fork would copy held locks of other threads
        context = get_context("spawn")
        # Ctrl-C reaches all processes of a terminal; this process ends the workers. They inherit the mask
        resource_tracker.ensure_running()  # its start would reset the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                own_end, worker_end = context.Pipe()
                process = context.Process(target=_serve, args=(self._stages, folder, worker_end), daemon=True)
                process.start()
                worker_end.close()
                self._processes[own_end] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for pipe, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

    def run(self, stage: TaskStage, tasks: Iterable[int]) -> Iterator[TaskResult]:
        """Run tasks of a stage in any order; yield each result when it is finished.

        Raises:
            MegaError: a process ended in the middle of a task.
            Exception: a task's own error.
        """
        number = self._stages.index(stage)
        waiting = deque(tasks)
        busy = dict[Connection, int]()
        idle = list(self._processes)
        while waiting or busy:
            while waiting and idle:
                pipe = idle.pop()
                busy[pipe] = waiting.popleft()
                try:
                    pipe.send((number, busy[pipe]))
                except (BrokenPipeError, ConnectionResetError):
                    self._raise_worker_died(stage, pipe)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                try:
                    result = ready.recv()
                except (EOFError, ConnectionResetError):
                    self._raise_worker_died(stage, ready)
                del busy[ready]
                idle.append(ready)
                if isinstance(result, BaseException):
                    raise result
                yield result

    def _raise_worker_died(self, stage: TaskStage, pipe: Connection) -> NoReturn:
        process = self._processes[pipe]
        process.join(TERMINATE_SECONDS)
        code = process.exitcode
        cause = f"{stage.name}, exit code {code}"
        if code is not None and code < 0:
            cause = f"{stage.name}, by {signal.Signals(-code).name}"
        hint = "run the same command again to resume"
        if code == -signal.SIGKILL:
            hint += "; if the system was out of memory, use fewer workers"
        raise MegaError("--workers", "a process was killed", found=cause, hint=hint)


def _serve(stages: Sequence[TaskStage], folder: Path, pipe: Connection) -> None:
    """Run a worker: receive numbers of stages and tasks, send results or errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)  # so that temporary files are removed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _exit_with_parent()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has exited
        while True:
            number, task = pipe.recv()
            try:
                answer: object = run_task(stages[number], task, folder)
            except Exception as error:
                answer = portable_error(error)
            pipe.send(answer)


def _exit_on_sigterm(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _exit_with_parent() -> None:
    """Exit a worker when its parent process dies, so that it does not write during the next run."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
