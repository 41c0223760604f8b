"""Evaluate a run's checkpoints by other programs, in the background."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mega_schema.checkpoint.checkpoint_dir import iteration_folder
from mega_train.config import RunConfig
from mega_train.telemetry.events import (
    CheckpointSaved,
    EvaluationEnd,
    Event,
    Message,
    TrainExit,
    TrainStart,
)

FOLDER = "evaluations"  # under --save
END_SECONDS = 600.0  # that a finished run waits for its evaluations
_POLL_SECONDS = 0.1  # between two looks at the end of a run
_TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL
# torchrun's variables would make the evaluation a rank of the run
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE")
_RANK_PREFIXES = ("LOCAL_", "ROLE_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True)
class CheckpointEvaluation:
    """A command for one checkpoint.

    Attributes:
        name: of its files under `evaluations/`, without a suffix.
    """

    iteration: int
    command: str
    name: str


class EvaluationRunner:
    """An observer that runs --evaluation-commands on checkpoints that were saved at a validation.

    One process runs at a time, on rank 0's machine. Its numbers become `EvaluationEnd` events. A command that
    fails causes a message; the run continues.

    Args:
        emit: receives the events, in the thread of the run.
        clock, sleep: seconds, and how to wait for the last evaluations.
    """

    def __init__(
        self,
        run: RunConfig,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert run.checkpoint.save is not None
        self._run_folder = run.checkpoint.save
        self._commands = run.evaluation.commands
        self._interval = run.evaluation.interval
        self._emit = emit
        self._clock = clock
        self._sleep = sleep
        self._last_iteration: int | None = None
        self._is_complete = False
        self._pending: deque[CheckpointEvaluation] = deque()
        self._current: CheckpointEvaluation | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start_time = 0.0

    def on_event(self, event: Event) -> None:
        match event:
            case TrainStart():
                self._last_iteration = event.iterations
            case CheckpointSaved() if not event.error:
                self._is_complete = event.iteration == self._last_iteration
                if event.iteration % self._interval == 0 or self._is_complete:
                    self._pending.extend(self._list_evaluations(event.iteration))
            case TrainExit():
                self._is_complete = False
            case Message() | EvaluationEnd():  # of this observer itself
                return
        self._poll()

    def close(self) -> None:
        """Wait for the evaluations of a finished run; end them if the run stopped before its end."""
        end_time = self._clock() + (END_SECONDS if self._is_complete else 0.0)
        self._poll()
        while self._current is not None and self._clock() < end_time:
            self._sleep(_POLL_SECONDS)
            self._poll()
        if self._current is not None:
            left = [self._current, *self._pending]
            self._terminate()
            self._pending.clear()
            names = ", ".join(evaluation.name for evaluation in left)
            self._emit(Message(f"evaluations that were not finished: {names}"))

    def _list_evaluations(self, iteration: int) -> list[CheckpointEvaluation]:
        tasks = [_task_name(command) for command in self._commands]
        folder = iteration_folder(self._run_folder, iteration).name
        return [
            CheckpointEvaluation(
                iteration,
                command,
                f"{task}-{number}-{folder}" if tasks.count(task) > 1 else f"{task}-{folder}",
            )
            for number, (task, command) in enumerate(zip(tasks, self._commands, strict=True), 1)
        ]

    def _poll(self) -> None:
        """Report a process that has ended, and start the next."""
        if self._process is not None and self._process.poll() is not None:
            self._report(self._process.returncode)
        if self._process is None and self._pending:
            self._start(self._pending.popleft())

    def _path(self, evaluation: CheckpointEvaluation, suffix: str) -> Path:
        return self._run_folder / FOLDER / f"{evaluation.name}{suffix}"

    def _start(self, evaluation: CheckpointEvaluation) -> None:
        checkpoint = iteration_folder(self._run_folder, evaluation.iteration)
        output = self._path(evaluation, ".json")
        words = [*shlex.split(evaluation.command), "--load", str(checkpoint), "--output", str(output)]
        try:
            output.parent.mkdir(exist_ok=True)
            # of an earlier run: the result must not be read as this one's, and mega-eval replaces no page
            for suffix in (".json", ".html"):
                self._path(evaluation, suffix).unlink(missing_ok=True)
            with self._path(evaluation, ".log").open("wb") as log:
                self._process = _start_process(words, log)
        except OSError as error:
            self._emit(Message(f"evaluation {evaluation.name} cannot start: {error.strerror}"))
            return
        self._current = evaluation
        self._start_time = self._clock()

    def _report(self, code: int) -> None:
        evaluation = self._current
        assert evaluation is not None
        self._process = self._current = None
        try:
            if code:
                raise ValueError(f"exit code {code}: {_last_line(self._path(evaluation, '.log'))}")
            task, metrics = _read_metrics(self._path(evaluation, ".json"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            words = " ".join(str(error).split())
            self._emit(Message(f"evaluation {evaluation.name} failed: {words}; training continues"))
            return
        self._emit(
            EvaluationEnd(
                iteration=evaluation.iteration,
                task=task,
                metrics=metrics,
                result=str(self._path(evaluation, ".json")),
                seconds=self._clock() - self._start_time,
            )
        )

    def _terminate(self) -> None:
        process = self._process
        assert process is not None
        self._process = self._current = None
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start_process(words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program in a group of its own, so that Ctrl-C reaches the run first."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _task_name(command: str) -> str:
    """Return the name of a command's files: its subcommand, or its program."""
    words = shlex.split(command)
    name = words[1] if len(words) > 1 and not words[1].startswith("-") else words[0]
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in Path(name).name)


def _read_metrics(path: Path) -> tuple[str, Mapping[str, float]]:
    """Return task and values from a result (docs/formats/result.md)."""
    record: Any = json.loads(path.read_bytes())
    values = {str(name): float(metric["value"]) for name, metric in record["metrics"].items()}
    task = "-".join(filter(None, (str(record["task"]), str(record["convention"]))))
    return task, {name: value for name, value in values.items() if math.isfinite(value)}


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output")[:300]
