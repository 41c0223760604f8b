"""Split work into tasks: each task of a stage writes its own files, then a marker file.

A killed run, or a run that moves to other machines, continues with the tasks that have no marker; the bytes
are the same. An executor (mega_data.executors) runs the tasks with `run_task`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from mega_schema.app.counts import format_count
from mega_schema.atomic_io import atomic_write, full_disk_errors, own_partial_file
from mega_schema.errors import ConfigError

log = logging.getLogger("mega.data")
TaskResult = dict[str, Any]
# called with a stage and its pending tasks; returns a function that is called with the result of each
StartProgress = Callable[["TaskStage", Sequence[int]], Callable[[TaskResult], object]]
PLAN = "plan.json"
FAILED = ".failed"  # in the folder of a run that ended at a wrong line
REMOVED = ".removed"  # suffix of a folder during its removal


@dataclass(frozen=True, slots=True)
class TaskStage:
    """Tasks that may run in any order and at the same time, all after the previous stage.

    Attributes:
        work: picklable; runs the task of a number below `tasks` and returns its result.
        sizes: bytes that each task reads, if known.
    """

    name: str
    tasks: int
    work: Callable[[int], TaskResult]
    after: TaskStage | None = None  # the previous stage
    only: int | None = None  # the only task of this process
    shard: tuple[int, int] = (0, 1)  # i of n: this process runs every n-th task from i on
    sizes: tuple[int, ...] = ()

    @property
    def own_tasks(self) -> range:
        """Return the tasks that this process runs."""
        if self.only is not None:
            return range(self.only, self.only + 1)
        return range(self.shard[0], self.tasks, self.shard[1])


@dataclass(frozen=True, slots=True)
class ReusableTasks:
    """The finished tasks that remain valid after a wrong line ended a run and inputs were corrected.

    Attributes:
        markers: folder, in the work folder, of the markers of the stage whose tasks read one input each.
        owners: number of the input of each task of the stage, or of all its inputs.
        skip: name of the option that skips wrong lines: a run with it reuses the tasks of a run without it.
        outputs: folder of the tasks' output; removed if no task is reusable.
        after_kill: the tasks remain valid too if a killed run, which left no sign of its end, had other
            versions of the same inputs.
    """

    markers: str
    owners: Sequence[int | tuple[int, ...]]
    skip: str
    outputs: Path
    after_kill: bool = False


def open_run_folder(folder: Path, wanted: TaskResult, reuse: ReusableTasks | None = None) -> None:
    """Create the folder of a run, or check that it belongs to the same inputs and options.

    Args:
        reuse: the tasks to keep if inputs differ from those of a run that ended early; None: none.

    Raises:
        ConfigError: the folder holds another run, or its plan is damaged.
    """
    file = folder / PLAN
    text = json.dumps(wanted, indent=1, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        # elements of a job array start together: each may find files of the others, and any plan is valid
        temporary = folder / f".plan-{uuid4().hex}"
        if any(not differing.name.startswith(".") for differing in folder.iterdir()) and not file.exists():
            raise ConfigError(
                folder, "is not empty, and contains no run of this command", hint="name another folder"
            )
        write_file(temporary, text)
        temporary.replace(file)
    recorded, current = _read_plan(folder), json.loads(text)
    differing = sorted(
        key for key in recorded.keys() | current.keys() if recorded.get(key) != current.get(key)
    )
    is_changed_input = (
        reuse is not None
        and reuse.after_kill
        and differing == ["inputs"]
        and _have_equal_paths(recorded, current)
    )
    if differing and reuse is not None and ((folder / FAILED).exists() or is_changed_input):
        _keep_finished_tasks(folder, recorded, current, differing, reuse)
        write_file(file, text)
    elif differing:
        what = f"contains a run with other {', '.join(differing)}"
        raise ConfigError(folder, what, hint=f"rm -r {folder}, or name another folder")


def planned_inputs(folder: Path) -> list[list[Any]]:
    """Return the inputs of the run in a work folder, as they were when it began."""
    inputs: list[list[Any]] = _read_plan(folder)["inputs"]
    return inputs


def _read_plan(folder: Path) -> TaskResult:
    """Read the plan of the run in a work folder.

    Raises:
        ConfigError: the file is damaged.
    """
    plan = _read_object(folder / PLAN, f"rm -r {folder}, then run the command again")
    if "inputs" not in plan:
        raise _damaged_error(folder / PLAN, f"rm -r {folder}, then run the command again")
    return plan


def _read_object(file: Path, hint: str) -> TaskResult:
    """Read a JSON object that a run wrote.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        values = json.loads(file.read_bytes())
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _damaged_error(file, hint)
    return values


def _damaged_error(file: Path, hint: str) -> ConfigError:
    size = format_count(file.stat().st_size, "byte")
    return ConfigError(file, "is damaged", found=size, wanted="a JSON object that a run wrote", hint=hint)


def _keep_finished_tasks(
    folder: Path, recorded: TaskResult, current: TaskResult, differing: Sequence[str], reuse: ReusableTasks
) -> None:
    """Remove the markers of the tasks whose input or option has changed."""
    kept_markers = set[Path]()
    options_fit = set(differing) <= {"inputs", reuse.skip} and recorded[reuse.skip] in (
        False,
        current[reuse.skip],
    )
    if options_fit and _have_equal_paths(recorded, current):
        pairs = enumerate(zip(recorded["inputs"], current["inputs"], strict=True))
        unchanged = {number for number, (old_state, new_state) in pairs if old_state == new_state}
        owners = [{owner} if isinstance(owner, int) else {*owner} for owner in reuse.owners]
        tasks = [task for task, numbers in enumerate(owners) if numbers <= unchanged]
        kept_markers = {folder / reuse.markers / f"{task:05d}.json" for task in tasks}
    for marker in [*folder.glob("**/done/*/*.json")]:
        if marker not in kept_markers:
            marker.unlink()
    if not kept_markers:
        remove_folder(reuse.outputs)
    (folder / FAILED).unlink(missing_ok=True)


def _have_equal_paths(recorded: TaskResult, current: TaskResult) -> bool:
    """Return whether two plans have the same input files, of any version."""
    return [path for path, *_ in recorded["inputs"]] == [path for path, *_ in current["inputs"]]


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no process sees it partly removed."""
    finish_removal(folder)
    if folder.is_dir():
        folder.rename(_removal_name(folder))
        finish_removal(folder)


def finish_removal(folder: Path) -> None:
    """Finish the removal of a folder that a killed process began."""
    shutil.rmtree(_removal_name(folder), ignore_errors=True)


def _removal_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name.removeprefix('.')}{REMOVED}")


def run_task(stage: TaskStage, task: int, folder: Path) -> TaskResult:
    """Run one task unless its marker exists; return its result."""
    marker = _marker(stage, task, folder)
    if not marker.exists():
        write_file(marker, json.dumps(stage.work(task)))
    return read_result(stage, task, folder)


def pending_tasks(stage: TaskStage, folder: Path) -> list[int]:
    """Return the tasks to run in this process: those without a marker.

    Raises:
        ConfigError: a task of the previous stage is not finished.
    """
    if stage.after is not None:
        read_results(stage.after, folder)
    pending = [task for task in stage.own_tasks if not _marker(stage, task, folder).exists()]
    if len(pending) < len(stage.own_tasks):
        log.info(
            "%s: %d of %d tasks were done before",
            stage.name,
            len(stage.own_tasks) - len(pending),
            stage.tasks,
        )
    return pending


def read_result(stage: TaskStage, task: int, folder: Path) -> TaskResult:
    """Read the result of a finished task.

    Raises:
        ConfigError: the task is not finished, or its marker is damaged.
    """
    marker = _marker(stage, task, folder)
    if not marker.exists():
        raise ConfigError(f"{stage.name} {task}", "is not done yet", wanted=f"{marker}")
    return _read_object(marker, f"rm {marker}: the task runs again")


def read_results(stage: TaskStage, folder: Path) -> list[TaskResult]:
    """Read the results of all tasks, by number."""
    return [read_result(stage, task, folder) for task in stage.own_tasks]


def no_progress(stage: TaskStage, tasks: Sequence[int]) -> Callable[[TaskResult], object]:
    """Report no progress."""
    return lambda result: None


def select_stages(stages: Sequence[TaskStage], only: str | None) -> list[TaskStage]:
    """Return the stages, or the one that `STAGE` or `STAGE:TASK` names, with one task; none for `plan`.

    Raises:
        ConfigError: there is no such stage or task.
    """
    if only is None:
        return list(stages)
    if only == "plan":
        return []
    name, _, number = only.partition(":")
    selected = next((stage for stage in stages if stage.name == name), None)
    if selected is None:
        raise ConfigError(
            "--stage",
            "no such stage",
            found=name,
            wanted=" | ".join(["plan", *(stage.name for stage in stages)]),
        )
    if not number:
        return [selected]
    if not number.isdecimal() or int(number) >= selected.tasks:
        raise ConfigError(
            "--stage", f"no such task of {name}", found=number, wanted=f"0 to {selected.tasks - 1}"
        )
    return [replace(selected, only=int(number))]


def write_file(path: Path, text: str) -> None:
    """Write a whole file or none; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_errors(path), atomic_write(path, own_partial_file(path)) as partial:
        partial.write_text(text, "utf-8")


def _marker(stage: TaskStage, task: int, folder: Path) -> Path:
    return folder / "done" / stage.name / f"{task:05d}.json"
