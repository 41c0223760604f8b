"""Show the progress of a stage after each finished task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from mega_data.task_stages import TaskResult, TaskStage
from mega_schema.app.progress import ProgressBar, progress_bar

MAX_LINES: Final = 50  # of a stage in a log


class TaskProgress:
    """Progress of a stage: finished tasks, time left, and amounts and rate if the bytes are known.

    A log gets a line for each task; or, for more than MAX_LINES tasks or unknown bytes, a line every ten
    seconds and a last one.
    """

    def __init__(self, label: str, stage: TaskStage, tasks: Sequence[int], bar: ProgressBar) -> None:
        """Start the display of a stage.

        Args:
            tasks: the tasks that earlier processes have not finished.
            bar: counts bytes, or tasks if the bytes are unknown.
        """
        self.label = label
        self.tasks = len(stage.own_tasks)
        self.count = self.tasks - len(tasks)
        self.has_sizes = _pending_bytes(stage, tasks) > 0
        self.bar = bar
        bar(0 if self.has_sizes else self.count, label=self._counted_label())  # the rate counts from here

    def __call__(self, result: TaskResult) -> None:
        self.count += 1
        show = self.count == self.tasks or (self.has_sizes and self.tasks <= MAX_LINES)
        amounts = (result["read"], result["documents"]) if self.has_sizes else (1, 0)
        self.bar(*amounts, label=self._counted_label(), show=show)

    def _counted_label(self) -> str:
        return f"{self.label} {self.count}/{self.tasks}"


def _pending_bytes(stage: TaskStage, tasks: Sequence[int]) -> int:
    """Return the bytes that the tasks read; 0 if they are unknown."""
    return sum(stage.sizes[task] for task in tasks) if stage.sizes else 0


@contextmanager
def task_progress(label: str, stage: TaskStage, tasks: Sequence[int]) -> Iterator[TaskProgress]:
    """Yield the progress of a stage; a terminal keeps its last state."""
    size = _pending_bytes(stage, tasks)
    total, unit = (size, "bytes") if size else (len(stage.own_tasks), None)
    with progress_bar(label, total, unit=unit, transient=False) as bar:
        yield TaskProgress(label, stage, tasks, bar)
