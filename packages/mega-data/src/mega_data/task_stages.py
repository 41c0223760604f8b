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

from mega_schema.atomic_io import atomic_write, full_disk_errors, own_partial_file
from mega_schema.errors import ConfigError

log = logging.getLogger("mega.data")
Result = dict[str, Any]
# told of a stage and of its tasks that are to be done here; what it returns is told of each that is done
Progress = Callable[["Stage", Sequence[int]], Callable[[Result], object]]
PLAN = "plan.json"
FAILED = ".failed"  # in the folder of a run that a wrong line ended
REMOVED = ".removed"  # ending of a folder that is being removed


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks that may run in any order and at the same time, all after the stage before.

    Attributes:
        work: picklable; does the task of a number below `tasks` and returns what is to be remembered of it.
        sizes: bytes that each task reads, where they are known.
    """

    name: str
    tasks: int
    work: Callable[[int], Result]
    after: Stage | None = None  # done whole before
    only: int | None = None  # the one task this process is to do; others have the rest
    share: tuple[int, int] = (0, 1)  # i of n: every n-th task from i on is to be done here
    sizes: tuple[int, ...] = ()

    @property
    def mine(self) -> range:
        """The tasks to do here."""
        if self.only is not None:
            return range(self.only, self.only + 1)
        return range(self.share[0], self.tasks, self.share[1])


@dataclass(frozen=True, slots=True)
class Reuse:
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


def plan(folder: Path, wanted: Result, reuse: Reuse | None = None) -> None:
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
        mine = folder / f".plan-{uuid4().hex}"
        if any(not other.name.startswith(".") for other in folder.iterdir()) and not file.exists():
            raise ConfigError(folder, "is not empty, and no run of this command", hint="name another folder")
        write(mine, text)
        mine.replace(file)
    found, ours = json.loads(file.read_bytes()), json.loads(text)
    other = sorted(key for key in found.keys() | ours.keys() if found.get(key) != ours.get(key))
    if other and reuse is not None and (folder / FAILED).exists():
        _keep_done(folder, found, ours, other, reuse)
        write(file, text)
    elif other:
        what = f"holds a run with other {', '.join(other)}"
        raise ConfigError(folder, what, hint=f"rm -r {folder}, or name another folder")


def planned_inputs(folder: Path) -> list[list[str | int]]:
    """The inputs of the run that has a work folder, as they were when it began."""
    inputs: list[list[str | int]] = json.loads((folder / PLAN).read_bytes())["inputs"]
    return inputs


def _keep_done(folder: Path, before: Result, now: Result, other: Sequence[str], reuse: Reuse) -> None:
    """Remove the markers of the tasks that have to be done again, as their input or an option has changed."""
    kept = set[Path]()
    options_fit = set(other) <= {"inputs", reuse.skip} and before[reuse.skip] in (False, now[reuse.skip])
    if options_fit and [path for path, *_ in before["inputs"]] == [path for path, *_ in now["inputs"]]:
        pairs = enumerate(zip(before["inputs"], now["inputs"], strict=True))
        unchanged = {number for number, (one, another) in pairs if one == another}
        tasks = [task for task, owner in enumerate(reuse.owners) if owner in unchanged]
        kept = {folder / reuse.markers / f"{task:05d}.json" for task in tasks}
    for marker in [*folder.glob("**/done/*/*.json")]:
        if marker not in kept:
            marker.unlink()
    if not kept:
        remove_folder(reuse.outputs)
    (folder / FAILED).unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no process finds it half removed."""
    remove_folder_left(folder)
    if folder.is_dir():
        folder.rename(_aside(folder))
        remove_folder_left(folder)


def remove_folder_left(folder: Path) -> None:
    """Finish the removal of a folder that a killed process began."""
    shutil.rmtree(_aside(folder), ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name.removeprefix('.')}{REMOVED}")


def perform(stage: Stage, task: int, folder: Path) -> Result:
    """Do one task unless its marker says that it is done; return what is remembered of it."""
    marker = _marker(stage, task, folder)
    if not marker.exists():
        write(marker, json.dumps(stage.work(task)))
    return result(stage, task, folder)


def left(stage: Stage, folder: Path) -> list[int]:
    """The tasks that are to be done here: those without a marker.

    Raises:
        ConfigError: a task of the stage before is not done.
    """
    if stage.after is not None:
        results(stage.after, folder)
    found = [task for task in stage.mine if not _marker(stage, task, folder).exists()]
    if len(found) < len(stage.mine):
        log.info("%s: %d of %d tasks were done before", stage.name, len(stage.mine) - len(found), stage.tasks)
    return found


def result(stage: Stage, task: int, folder: Path) -> Result:
    """What is remembered of a task that is done.

    Raises:
        ConfigError: it is not done.
    """
    marker = _marker(stage, task, folder)
    if not marker.exists():
        raise ConfigError(f"{stage.name} {task}", "is not done yet", wanted=f"{marker}")
    found: Result = json.loads(marker.read_bytes())
    return found


def results(stage: Stage, folder: Path) -> list[Result]:
    """What is remembered of all tasks, by number."""
    return [result(stage, task, folder) for task in stage.mine]


def silent(stage: Stage, tasks: Sequence[int]) -> Callable[[Result], object]:
    """Progress that nobody is told of."""
    return lambda result: None


def chosen(stages: Sequence[Stage], only: str | None) -> list[Stage]:
    """The stages, or the one that `STAGE` or `STAGE:TASK` names, with that task alone; for `plan` none.

    Raises:
        ConfigError: there is no such stage or task.
    """
    if only is None:
        return list(stages)
    if only == "plan":
        return []
    name, _, number = only.partition(":")
    found = next((stage for stage in stages if stage.name == name), None)
    if found is None:
        raise ConfigError(
            "--only",
            "no such stage",
            found=name,
            wanted=" | ".join(["plan", *(stage.name for stage in stages)]),
        )
    if not number:
        return [found]
    if not number.isdecimal() or int(number) >= found.tasks:
        raise ConfigError("--only", f"no such task of {name}", found=number, wanted=f"0 to {found.tasks - 1}")
    return [replace(found, only=int(number))]


def write(path: Path, text: str) -> None:
    """Write a whole file or none; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_errors(path), atomic_write(path, own_partial_file(path)) as partial:
        partial.write_text(text, "utf-8")


def _marker(stage: Stage, task: int, folder: Path) -> Path:
    return folder / "done" / stage.name / f"{task:05d}.json"
