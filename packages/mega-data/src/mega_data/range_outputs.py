"""The output files of a stage whose tasks read inputs, or ranges of large ones.

A task that reads all of an input writes the final files. The tasks of a divided input write parts, which
stage `join` concatenates in their order:

    OUTPUT/a.jsonl                     the documents of an input
    PARTS/00003/output/a.jsonl         of a range, and so on for `dropped` and `quarantine`
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Final

import orjson

from mega_data.jsonl_shards import Quarantine, file_bytes, file_states, output_name
from mega_data.output_formats import open_output
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import InputRange, cuts_by_input
from mega_data.task_stages import TaskResult, TaskStage, read_result
from mega_data.texts import dump_line
from mega_schema.atomic_io import atomic_write, full_disk_errors, own_partial_file

JOIN: Final = "join"
_COPIED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RangeOutputs:
    """The output files of the tasks of a stage.

    Attributes:
        ranges: what each task reads.
        output: folder of the kept documents.
        parts: folder for the files of ranges.
        dropped: folder of the dropped documents; None does not write them.
        quarantine: folder for lines that are not documents; None: the first such line ends the run.
        suffix: suffix of the format of the kept documents, see `output_formats`.
        is_joined: whether `join` writes the kept documents of divided inputs; else a later pass reads the
            parts.
    """

    ranges: tuple[InputRange, ...]
    output: Path
    parts: Path
    dropped: Path | None = None
    quarantine: Path | None = None
    suffix: str = ""
    is_joined: bool = True

    @contextmanager
    def open(self, task: int) -> Iterator[tuple[IO[bytes], IO[bytes] | None, Quarantine | None]]:
        """Open the outputs of a task: kept, dropped and wrong lines."""
        with ExitStack() as stack:
            yield (
                stack.enter_context(open_output(self.output_path(task))),
                stack.enter_context(open_output(self.dropped_path(task))) if self.dropped else None,
                stack.enter_context(self.open_quarantine(task)) if self.quarantine else None,
            )

    def open_quarantine(self, task: int) -> Quarantine:
        """Open the file for the lines of a task that are not documents."""
        assert self.quarantine is not None
        return Quarantine(self._path(task, self.quarantine), self.ranges[task])

    def output_path(self, task: int) -> Path:
        """Return the file of the kept documents of a task."""
        # Parquet has the types of all documents, so its parts are lines
        suffix = "" if self.suffix == ".parquet" and self._is_part(task) else self.suffix
        return self._path(task, self.output, suffix)

    def dropped_path(self, task: int) -> Path:
        assert self.dropped is not None
        return self._path(task, self.dropped)

    def side_path(self, task: int, folder: Path, name: str) -> Path:
        """Return the path of a further file of a task, in the folder or, of a range, among the parts."""
        return self._part_folder(task, folder) / name if self._is_part(task) else folder / name

    def _path(self, task: int, folder: Path, suffix: str = "") -> Path:
        return self.side_path(task, folder, output_name(self.ranges[task].item.path, suffix))

    def _is_part(self, task: int) -> bool:
        neighbours = [*self.ranges[max(0, task - 1) : task], *self.ranges[task + 1 : task + 2]]
        return any(part.input == self.ranges[task].input for part in neighbours)

    def _part_folder(self, task: int, folder: Path) -> Path:
        kinds = {self.output: "output", self.dropped: "dropped", self.quarantine: "quarantine"}
        return self.parts / f"{task:05d}" / kinds.get(folder, folder.name)

    def divided_inputs(self) -> list[range]:
        """Return the tasks of each divided input."""
        groups = groupby(range(len(self.ranges)), lambda task: self.ranges[task].input)
        inputs = [[*tasks] for _, tasks in groups]
        return [range(tasks[0], tasks[-1] + 1) for tasks in inputs if len(tasks) > 1]

    def as_inputs(self) -> tuple[InputRange, ...]:
        """Return the kept documents as inputs of a next pass: the file of each task."""
        return tuple(
            InputRange(InputFile(self.output_path(task), "jsonl"), part.input, 0, None, 0)
            for task, part in enumerate(self.ranges)
        )

    def add_join(
        self, stages: Sequence[TaskStage], folder: Path, join_more: Callable[[range], object] | None = None
    ) -> list[TaskStage]:
        """Add the stage that joins parts, if there are any.

        Args:
            stages: the results of the tasks of the last one have `lines`, those that each read.
            folder: work folder of the stages.
            join_more: joins further files of the tasks of an input.
        """
        inputs = self.divided_inputs()
        if not inputs or not (self.is_joined or self.dropped or self.quarantine):
            return [*stages]
        joiner = PartJoiner(self, folder, stages[-1], join_more)
        sizes = tuple(sum(self.ranges[task].size for task in tasks) for tasks in inputs)
        return [*stages, TaskStage(JOIN, len(inputs), joiner.run, after=stages[-1], sizes=sizes)]


def range_bytes(part: InputRange) -> int:
    """Return the bytes on disk; of a whole file 0 before the stage that writes it."""
    return file_bytes(part.item.path) if part.is_whole else part.size


def planned_ranges(ranges: Sequence[InputRange]) -> dict[str, list[Any]]:
    """Return the inputs and their ranges for the plan of a run, by which a later run recognizes them."""
    cuts = cuts_by_input(ranges)
    items = list({part.input: part.item for part in ranges}.values())
    codes = [item.adapter.code if item.adapter else "" for item in items]
    states = file_states([item.path for item in items])
    inputs = [[*state, *values] for state, *values in zip(states, cuts, codes, strict=True)]
    return {"inputs": inputs, "split-mb": [*map(len, cuts)]}


def result_stage(stages: Sequence[TaskStage]) -> TaskStage:
    """Return the stage whose tasks count documents: the last one before a join."""
    return next(stage for stage in reversed(stages) if stage.name != JOIN)


@dataclass(frozen=True, slots=True)
class PartJoiner:
    """Writes the files of a divided input from those of its ranges.

    Attributes:
        folder: work folder of the stage.
        counted: stage that wrote the parts.
    """

    outputs: RangeOutputs
    folder: Path
    counted: TaskStage
    join_more: Callable[[range], object] | None = None

    def run(self, number: int) -> TaskResult:
        outputs = self.outputs
        tasks = outputs.divided_inputs()[number]
        source = outputs.ranges[tasks[0]].item.path
        if outputs.is_joined:
            target = outputs.output / output_name(source, outputs.suffix)
            _concatenate([outputs.output_path(task) for task in tasks], target)
        if outputs.dropped is not None:
            target = outputs.dropped / output_name(source)
            _concatenate([outputs.dropped_path(task) for task in tasks], target)
        if outputs.quarantine is not None:
            self._join_quarantine(tasks, outputs.quarantine / output_name(source))
        if self.join_more is not None:
            self.join_more(tasks)
        return {"read": sum(outputs.ranges[task].size for task in tasks), "documents": 0}

    def _join_quarantine(self, tasks: range, target: Path) -> None:
        """Write the wrong lines of all ranges, each with its number in the file."""
        paths = {task: self.outputs.open_quarantine(task).path for task in tasks}
        if not any(path.exists() for path in paths.values()):
            target.unlink(missing_ok=True)
            return
        results = [read_result(self.counted, task, self.folder) for task in tasks]
        numbers = lines_before(self.outputs.ranges[tasks.start : tasks.stop], results)
        first_lines = dict(zip(tasks, numbers, strict=True))
        with open_output(target) as out:
            for task, path in paths.items():
                lines = path.read_bytes().splitlines() if path.exists() else []
                for values in map(orjson.loads, lines):
                    # a part that an earlier pass wrote is a file of its own
                    before = 0 if self.outputs.ranges[task].is_whole else first_lines[task]
                    out.write(dump_line({**values, "line": values["line"] + before}))


def lines_before(ranges: Sequence[InputRange], results: Sequence[TaskResult]) -> list[int]:
    """Return the number of lines of its input before each range.

    Args:
        results: of a stage that reads the ranges, with `lines`.
    """
    numbers = list[int]()
    lines = 0
    for task, (part, result) in enumerate(zip(ranges, results, strict=True)):
        if task == 0 or ranges[task - 1].input != part.input:
            lines = 0
        numbers.append(lines)
        lines += result["lines"]
    return numbers


def _concatenate(parts: Sequence[Path], target: Path) -> None:
    # members of gzip and frames of zstd may follow each other
    opened = open_output(target) if target.suffix == ".parquet" else _open_raw(target)
    with opened as out:
        for path in parts:
            with path.open("rb") as file:
                shutil.copyfileobj(file, out, _COPIED_BYTES)


@contextmanager
def _open_raw(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_errors(path),
        atomic_write(path, own_partial_file(path)) as partial,
        partial.open("wb") as file,
    ):
        yield file
