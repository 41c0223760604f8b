"""Path types, options and progress displays that the commands share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mega_data.error_limit import ErrorCount, ErrorLimit
    from mega_data.task_stages import TaskResult, TaskStage

EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)
WORKERS = click.IntRange(min=1)
MAX_LINES = 50  # of progress of a stage in a log
SECONDS_PER_LINE = 10.0  # between two lines of progress in a log
EXECUTOR = click.Choice(["local", "slurm-array", "ray"])
ON_ERROR = click.Choice(["fail", "skip"])
LAST_CALL_HELP = "the last call, without --only, publishes the files."
FOLDER = click.Path(file_okay=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])


def inputs_option(help_text: str) -> Callable[[Command], Command]:
    """Build `--input` of the commands whose tasks are files."""
    return click.option("--input", "inputs", multiple=True, required=True, help=help_text)


def max_errors_option(rows: str, share: str = "of all") -> Callable[[Command], Command]:
    """Build `--max-errors` of the commands that have `--on-error`."""
    text = f"With --on-error skip: fail after more than N {rows}, or N% {share} read."
    return click.option("--max-errors", metavar="N|N%", help=text)


def error_limit(on_error: str, text: str | None) -> ErrorLimit:
    """Parse the limit that the flags name.

    Raises:
        ConfigError: the text is no limit, or wrong rows end the run anyway.
    """
    from mega_data.error_limit import OPTION, ErrorLimit
    from mega_schema.errors import ConfigError

    if text is None:
        return ErrorLimit()
    if on_error != "skip":
        hint = f"--on-error skip {OPTION} {text}"
        raise ConfigError(OPTION, "says nothing without --on-error skip", hint=hint)
    return ErrorLimit.parse(text)


def document_options(command: Command) -> Command:
    """Add the flags of the commands that read JSON lines or tables and write JSON lines."""
    text = "JSON lines or .parquet, also .gz .zst .xz .bz2 .lz4: files, globs, folders, saved datasets."
    options = (
        click.option("--input", "inputs", multiple=True, required=True, help=text),
        click.option("--json-key", default="text", help="Key of the text in a line."),
        click.option(
            "--id-key", default="", show_default=False, help="Key of a document's id, written to dropped/."
        ),
        click.option(
            "--on-error", type=ON_ERROR, default="fail", help="What to do with a line that is no document."
        ),
        max_errors_option("wrong lines"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def exit_if_nothing_left(written: int, read: int) -> None:
    """Exit with code 1 if a command wrote no document, so that a script stops.

    Raises:
        SystemExit: no document was written.
    """
    if written:
        return
    reason = f"none of {read:,} documents is left" if read else "the inputs hold no document"
    click.echo(f"note: {reason}: exit code 1", err=True)
    raise SystemExit(1)


def warn_replaced(prefix: Path) -> None:
    """Print that a dataset exists already and that this run replaces it."""
    click.echo(f"note: {prefix}: a dataset is there already; it is replaced when this run ends", err=True)


def warn_skipped(count: int, folder: Path) -> None:
    """Print how many lines are in the quarantine, if there are any."""
    if count:
        click.echo(f"note: {count:,} lines were passed over, see {folder}", err=True)


@contextmanager
def work_folder(
    named: Path | None, default: Path, output: Path, *, whole_run: bool, lock: Path
) -> Iterator[Path]:
    """Yield the folder of a run's intermediate files; lock out other runs to the same output.

    Args:
        named: the folder of --work; None uses `default`.
        whole_run: this process does all of the run.
        lock: the folder to lock.

    Raises:
        ConfigError: another run writes there.
    """
    from mega_data.output_folder import keep_finished_tasks, lock_folder

    folder = named or default
    with (
        lock_folder(lock, shared=not whole_run),
        keep_finished_tasks(folder, output, whole_run=whole_run and named is None),
    ):
        yield folder


def is_whole_run(executor: str, only: str | None) -> bool:
    """Return whether this process does all of a run."""
    return only is None and executor != "slurm-array"


def check_has_stage(executor: str, only: str | None, stages: Iterable[str]) -> None:
    """Refuse an element of a job array without a stage, before it creates the folder of the run.

    Raises:
        ConfigError: the element has no stage; it cannot know when the others are finished.
    """
    from mega_data.executors.slurm import refuse_whole_run

    if only is None and not is_whole_run(executor, only):
        refuse_whole_run(stages)


@contextmanager
def check_inputs_unchanged(folder: Path) -> Iterator[None]:
    """Fail if an input changes before or during the tasks of a run.

    Args:
        folder: work folder of the run.

    Raises:
        FormatError: an input has changed since the run began.
    """
    from mega_data.jsonl_shards import check_file_states
    from mega_data.task_stages import planned_inputs

    inputs = planned_inputs(folder)
    try:
        yield
    except Exception:  # may be a consequence of the change
        check_file_states(inputs)
        raise
    check_file_states(inputs)


def run_stages(
    stages: Sequence[TaskStage],
    folder: Path,
    *,
    executor: str,
    workers: int,
    only: str | None,
    errors: ErrorCount,
    label: str = "",
) -> list[list[TaskResult]] | None:
    """Run stages on an executor; print a line on stderr after each finished task.

    Args:
        errors: counts the rows that the tasks skip, including those of earlier processes.
        label: begins each line.

    Raises:
        TooManyErrors: more rows are skipped than the limit allows.
    """
    import os

    from mega_data.executors.dispatch import execute
    from mega_data.task_stages import read_result

    def progress(stage: TaskStage, tasks: Sequence[int]) -> Callable[[TaskResult], None]:
        for task in set(stage.own_tasks).difference(tasks):
            errors.add(read_result(stage, task, folder))
        show = TaskProgress(f"{label}{stage.name}", stage, tasks)

        def end_task(result: TaskResult) -> None:
            show(result)
            errors.add(result)

        return end_task

    results = execute(
        stages,
        folder,
        executor=executor,
        workers=workers,
        only=only,
        environment=os.environ,
        progress=progress,
    )
    if results is not None:
        errors.end_pass()
    return results


class TaskProgress:
    """Progress of a stage: finished tasks, time left, and the rate if the bytes are known.

    A terminal shows one line, rewritten. A log has a line for each task. If a stage has more than MAX_LINES
    tasks, or their bytes are unknown, a log has a line every SECONDS_PER_LINE, and the last.
    """

    def __init__(
        self, label: str, stage: TaskStage, tasks: Sequence[int], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.label = label
        self.now = now
        self.started_at = now()
        self.tasks = len(stage.own_tasks)
        self.done_before = len(stage.own_tasks) - len(tasks)
        self.count = self.done_before
        self.size = sum(stage.sizes[task] for task in tasks) if stage.sizes else 0
        self.read = self.documents = 0
        self.last_shown = float("-inf") if self.size else self.started_at

    def __call__(self, result: TaskResult) -> None:
        self.count += 1
        now = self.now()
        line = f"{self.label} {self.count}/{self.tasks}"
        if self.size:
            self.read += result["read"]
            self.documents += result["documents"]
            rate = self.read / max(now - self.started_at, 1e-9)
            line += f": {self.read / 1e6:.1f} of {self.size / 1e6:.1f} MB, {self.documents:,} documents"
            line += f", {rate / 1e6:.1f} MB/s"
            if rate:  # zero for empty files
                line += f", {(self.size - self.read) / rate:.0f} s left"
        else:
            seconds = (now - self.started_at) / (self.count - self.done_before)
            line += f": {(self.tasks - self.count) * seconds:.0f} s left"
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", err=True, nl=self.count == self.tasks)
        elif self._is_due(now):
            self.last_shown = now
            click.echo(line, err=True)

    def _is_due(self, now: float) -> bool:
        is_every_task = self.size and self.tasks <= MAX_LINES
        return bool(is_every_task) or self.count == self.tasks or now - self.last_shown >= SECONDS_PER_LINE


class RepeatableOptionCommand(click.Command):
    """A command whose repeatable options take several words, as Megatron's: `--input a b`.

    It has no positional arguments, so a word after an option belongs to that option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        multiple = [o for o in self.params if isinstance(o, click.Option) and o.multiple]
        repeatable = {name for option in multiple for name in option.opts}
        spread = list[str]()
        option = ""
        values = 0
        for word in args:
            if word.startswith("-") and word != "-":  # "-" is stdin
                option = word
                values = 0
            elif option in repeatable:
                values += 1
                if values > 1:
                    spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[..., object]]:
    """Yield a function to call with the bytes, and documents, done since its last call.

    It shows bytes, documents, rate and time left: a bar if stderr is a terminal, else a line every ten
    seconds.
    """
    if not sys.stderr.isatty():
        yield _LogProgress(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    documents_column = "{task.fields[documents]}"
    columns = (BarColumn(), DownloadColumn(), documents_column, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("{task.description}", *columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total or None, documents="")
        total_documents = 0

        def update(size: int, documents: int = 0) -> None:
            nonlocal total_documents
            total_documents += documents
            bars.update(
                task, advance=size, documents=f"{total_documents:,} documents" if total_documents else ""
            )

        yield update


class _LogProgress:
    """Progress for a log file: a line every ten seconds.

    The rate counts from the first call on, whose bytes belong to an earlier run or to the start.
    """

    def __init__(self, label: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self.label = label
        self.total = total
        self.now = now
        self.done_bytes = 0
        self.documents = 0
        self.first_size = 0
        self.started_at = 0.0
        self.last_shown = now()

    def __call__(self, size: int, documents: int = 0) -> None:
        now = self.now()
        if not self.done_bytes:
            self.first_size = size
            self.started_at = now
        self.done_bytes += size
        self.documents += documents
        if now - self.last_shown < SECONDS_PER_LINE or now <= self.started_at:
            return
        self.last_shown = now
        rate = (self.done_bytes - self.first_size) / (now - self.started_at)
        time_left = (
            f", {max(self.total - self.done_bytes, 0) / rate:.0f} s left" if self.total and rate else ""
        )
        total = f" of {self.total / 1e6:.1f}" if self.total else ""
        documents_text = f", {self.documents:,} documents" if self.documents else ""
        line = f"{self.label}: {self.done_bytes / 1e6:.1f}{total} MB{documents_text}"
        line += f", {rate / 1e6:.1f} MB/s{time_left}"
        click.echo(line, err=True)
