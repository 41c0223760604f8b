"""Work cut into tasks: a stage has numbered ones, each writes its own files, then a marker that it is done.

A run that was killed, or whose machines change, goes on with the tasks that have no marker; the bytes are
the same. What runs the tasks is an executor (mega_data.executors); every one of them calls `perform`.
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

from mega_schema.atomic_io import own_partial_file, replacing, reporting_full_disk
from mega_schema.errors import ConfigError

log = logging.getLogger("mega.data")
TaskResult = dict[str, Any]
# told of a stage and of its tasks that are to be done here; what it returns is told of each that is done
StartProgress = Callable[["TaskStage", Sequence[int]], Callable[[TaskResult], object]]
PLAN = "plan.json"
FAILED = ".failed"  # in the folder of a run that a wrong line ended
REMOVED = ".removed"  # ending of a folder that is being removed


@dataclass(frozen=True, slots=True)
class TaskStage:
    """Tasks that may run in any order and at the same time, all after the stage before.

    Attributes:
        work: picklable; does the task of a number below `tasks` and returns what is to be remembered of it.
        sizes: bytes that each task reads, where they are known.
    """

    name: str
    tasks: int
    work: Callable[[int], TaskResult]
    after: TaskStage | None = None  # done whole before
    only: int | None = None  # the one task this process is to do; others have the rest
    share: tuple[int, int] = (0, 1)  # i of n: every n-th task from i on is to be done here
    sizes: tuple[int, ...] = ()

    @property
    def own_tasks(self) -> range:
        """The tasks to do here."""
        if self.only is not None:
            return range(self.only, self.only + 1)
        return range(self.share[0], self.tasks, self.share[1])


@dataclass(frozen=True, slots=True)
class ReusableTasks:
    """Which tasks of a run that a wrong line ended stay done in the next, whose inputs were mended.

    Attributes:
        markers: folder of the markers, in the work folder, of the stage whose tasks read one input each.
        owners: of each task of the stage, the number of its input.
        skip: the option that passes over wrong lines: a run with it takes over the tasks of one without it.
        outputs: folder of what the tasks wrote; removed where nothing stays.
    """

    markers: str
    owners: Sequence[int]
    skip: str
    outputs: Path


def open_run_folder(folder: Path, wanted: TaskResult, reuse: ReusableTasks | None = None) -> None:
    """Make the folder of a run, or see that it is one of the same inputs and options.

    Args:
        reuse: what stays of a run that a wrong line ended, where inputs differ; None: nothing.

    Raises:
        ConfigError: the folder holds another run.
    """
    file, text = folder / PLAN, json.dumps(wanted, indent=1, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        # elements of a job array begin at once: each may find the others' files, and the plan of any will do
        temporary = folder / f".plan-{uuid4().hex}"
        if any(not differing.name.startswith(".") for differing in folder.iterdir()) and not file.exists():
            raise ConfigError(folder, "is not empty, and no run of this command", hint="name another folder")
        write_file(temporary, text)
        temporary.replace(file)
    recorded, current = json.loads(file.read_bytes()), json.loads(text)
    differing = sorted(
        key for key in recorded.keys() | current.keys() if recorded.get(key) != current.get(key)
    )
    if differing and reuse is not None and (folder / FAILED).exists():
        _keep_finished_tasks(folder, recorded, current, differing, reuse)
        write_file(file, text)
    elif differing:
        what = f"holds a run with other {', '.join(differing)}"
        raise ConfigError(folder, what, hint=f"rm -r {folder}, or name another folder")


def planned_inputs(folder: Path) -> list[list[str | int]]:
    """The inputs of the run that has a work folder, as they were when it began."""
    inputs: list[list[str | int]] = json.loads((folder / PLAN).read_bytes())["inputs"]
    return inputs


def _keep_finished_tasks(
    folder: Path, recorded: TaskResult, current: TaskResult, differing: Sequence[str], reuse: ReusableTasks
) -> None:
    """Remove the markers of the tasks that have to be done again, as their input or an option has changed."""
    kept_markers = set[Path]()
    options_fit = set(differing) <= {"inputs", reuse.skip} and recorded[reuse.skip] in (
        False,
        current[reuse.skip],
    )
    if options_fit and [path for path, *_ in recorded["inputs"]] == [path for path, *_ in current["inputs"]]:
        pairs = enumerate(zip(recorded["inputs"], current["inputs"], strict=True))
        unchanged = {number for number, (old_state, new_state) in pairs if old_state == new_state}
        tasks = [task for task, owner in enumerate(reuse.owners) if owner in unchanged]
        kept_markers = {folder / reuse.markers / f"{task:05d}.json" for task in tasks}
    for marker in [*folder.glob("**/done/*/*.json")]:
        if marker not in kept_markers:
            marker.unlink()
    if not kept_markers:
        remove_folder(reuse.outputs)
    (folder / FAILED).unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no process finds it half removed."""
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
    """Do one task unless its marker says that it is done; return what is remembered of it."""
    marker = _marker(stage, task, folder)
    if not marker.exists():
        write_file(marker, json.dumps(stage.work(task)))
    return read_result(stage, task, folder)


def pending_tasks(stage: TaskStage, folder: Path) -> list[int]:
    """The tasks that are to be done here: those without a marker.

    Raises:
        ConfigError: a task of the stage before is not done.
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
    """What is remembered of a task that is done.

    Raises:
        ConfigError: it is not done.
    """
    marker = _marker(stage, task, folder)
    if not marker.exists():
        raise ConfigError(f"{stage.name} {task}", "is not done yet", wanted=f"{marker}")
    result: TaskResult = json.loads(marker.read_bytes())
    return result


def read_results(stage: TaskStage, folder: Path) -> list[TaskResult]:
    """What is remembered of all tasks, by number."""
    return [read_result(stage, task, folder) for task in stage.own_tasks]


def no_progress(stage: TaskStage, tasks: Sequence[int]) -> Callable[[TaskResult], object]:
    """Progress that nobody is told of."""
    return lambda result: None


def select_stages(stages: Sequence[TaskStage], only: str | None) -> list[TaskStage]:
    """The stages, or the one that `STAGE` or `STAGE:TASK` names, with that task alone; for `plan` none.

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
            "--only",
            "no such stage",
            found=name,
            wanted=" | ".join(["plan", *(stage.name for stage in stages)]),
        )
    if not number:
        return [selected]
    if not number.isdecimal() or int(number) >= selected.tasks:
        raise ConfigError(
            "--only", f"no such task of {name}", found=number, wanted=f"0 to {selected.tasks - 1}"
        )
    return [replace(selected, only=int(number))]


def write_file(path: Path, text: str) -> None:
    """Write a whole file or none; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with reporting_full_disk(path), replacing(path, own_partial_file(path)) as partial:
        partial.write_text(text, "utf-8")


def _marker(stage: TaskStage, task: int, folder: Path) -> Path:
    return folder / "done" / stage.name / f"{task:05d}.json"
