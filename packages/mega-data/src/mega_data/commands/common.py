"""Path types, options and progress displays that the commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from mega_data.commands.result_file import record_stages
from mega_schema.app.click_options import LocalPath, MultiValueCommand
from mega_schema.app.counts import format_count

if TYPE_CHECKING:
    from mega_data.error_limit import ErrorCount, ErrorLimit
    from mega_data.readers.adapters import Adapter
    from mega_data.task_stages import TaskResult, TaskStage

EXISTING = LocalPath(exists=True, dir_okay=False)
ANY_PATH = LocalPath()
WORKERS = click.IntRange(min=1)
MAX_NAMED = 20  # damaged files
EXECUTOR = click.Choice(["local", "slurm-array", "ray"])
ON_ERROR = click.Choice(["fail", "skip"])
LAST_CALL_HELP = "the last call, without --stage, publishes the files."
FOLDER = LocalPath(file_okay=False)

Command = TypeVar("Command", bound=Callable[..., Any])


def inputs_option(help_text: str) -> Callable[[Command], Command]:
    """Build `--input` of the commands whose tasks are files."""
    return click.option("--input", "inputs", multiple=True, required=True, help=help_text)


def adapter_option(command: Command) -> Command:
    """Add `--adapter` to a command that reads rows."""
    text = "Function that converts a row (dict) of a file (path) to a document, or to None to leave it out."
    return click.option("--adapter", metavar="python:MODULE:FUNCTION", help=text)(command)


def open_adapter(text: str | None) -> Adapter | None:
    """Open the adapter that the flag names, None for none.

    Raises:
        ConfigError: there is no such function.
    """
    from mega_data.readers.adapters import Adapter

    return None if text is None else Adapter.parse(text)


def max_errors_option(
    rows: str, share: str = "of all", damage: str = ", and at any damaged file"
) -> Callable[[Command], Command]:
    """Build `--max-errors` of the commands that have `--on-error`."""
    text = f"With --on-error skip: fail after more than N {rows}, or N% {share} read{damage}."
    return click.option("--max-errors", metavar="N|N%", help=text)


def error_limit(on_error: str, text: str | None) -> ErrorLimit:
    """Parse the limit that the flags name.

    Raises:
        ConfigError: the text is not a limit, or --on-error is not skip.
    """
    from mega_data.error_limit import OPTION, ErrorLimit
    from mega_schema.errors import ConfigError

    if text is None:
        return ErrorLimit()
    if on_error != "skip":
        hint = f"--on-error skip {OPTION} {text}"
        raise ConfigError(OPTION, "has no effect without --on-error skip", hint=hint)
    return ErrorLimit.parse(text)


def placement_options(
    workers_help: str = "Worker processes.", no_tasks_help: str = ""
) -> Callable[[Command], Command]:
    """Build `--workers`, `--executor` and `--stage` of a command whose run is divided into tasks.

    Args:
        no_tasks_help: text for `--executor` of a command that has no tasks by default.
    """
    default = None if no_tasks_help else "local"
    executor_help = no_tasks_help or "Where the tasks run."
    options = (
        click.option("--workers", type=WORKERS, default=1, help=workers_help),
        click.option("--executor", type=EXECUTOR, default=default, help=executor_help),
        click.option("--stage", "only", help=f"Run only plan, STAGE or STAGE:TASK; {LAST_CALL_HELP}"),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def output_format_option(content: str, default: str | None = "jsonl") -> Callable[[Command], Command]:
    """Build `--output-format` of the commands that write a file per input."""
    text = f"Format of the files of {content}."
    if default is None:
        text += "  [default: jsonl, or by the name of one file]"
    formats = click.Choice(["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
    return click.option("--output-format", type=formats, default=default, help=text)


def output_suffix(output_format: str | None, output: Path | None = None) -> str:
    """Return the suffix of the files of a format, see `output_formats`.

    Args:
        output_format: value of --output-format; None: not given.
        output: --output, if its name can be the name of one file.

    Raises:
        ConfigError: the library for the format is not installed, or the name of one file contradicts it.
    """
    from mega_data.output_formats import OUTPUT_FORMATS, check_output_format, file_ending
    from mega_schema.errors import ConfigError

    option = "--output-format"
    if output is not None and (ending := file_ending(output)):
        if output_format not in (None, ending[1:]):
            wanted = f"{ending[1:]}, by the name of --output"
            raise ConfigError(option, "contradicts --output", found=output_format, wanted=wanted)
        check_output_format("--output", ending)
        return ""
    suffix = OUTPUT_FORMATS[output_format or "jsonl"]
    check_output_format(option, suffix)
    return suffix


def exit_if_nothing_left(written: int, read: int) -> None:
    """Exit with code 1 if a command wrote no document, so that a script stops.

    Raises:
        SystemExit: no document was written.
    """
    if written:
        return
    reason = f"none of {format_count(read, 'document')} is left" if read else "the inputs hold no document"
    click.echo(f"note: {reason}: exit code 1", err=True)
    raise SystemExit(1)


def warn_replaced(output: Path, kind: str = "dataset") -> None:
    """Print that an output exists already and that this run replaces it."""
    click.echo(f"note: {output}: this {kind} exists; it is replaced when this run ends", err=True)


def mark_output(output: Path, command: str, only: str | None) -> None:
    """Record in an output folder the command that writes it; note that it replaces a finished run."""
    from mega_data.output_folder import has_finished_run, write_marker

    if only in (None, "plan") and has_finished_run(output):
        warn_replaced(output, "output")
    write_marker(output, command)


def warn_skipped(count: int, folder: Path) -> None:
    """Print how many lines are in the quarantine, if there are any."""
    if count:
        lines = format_count(count, "line was skipped", "lines were skipped")
        click.echo(f"note: {lines}, see {folder}", err=True)


def warn_damaged(files: Sequence[str]) -> None:
    """Print the files whose rest was skipped, and why."""
    for why in files[:MAX_NAMED]:
        click.echo(f"note: {why}: the rest of it was skipped", err=True)
    if len(files) > MAX_NAMED:
        click.echo(
            f"note: the rest of {format_count(len(files) - MAX_NAMED, 'more file')} was skipped", err=True
        )


@contextmanager
def work_folder(
    named: Path | None, default: Path, output: Path, *, whole_run: bool, lock: Path
) -> Iterator[Path]:
    """Yield the folder of a run's intermediate files; lock out other runs to the same output.

    Args:
        named: the folder of --work-dir; None uses `default`.
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
    """Refuse an element of a job array without --stage, before it creates the folder of the run.

    The call with `--stage plan` writes the names of the stages to the result file.

    Raises:
        ConfigError: the element has no stage; it cannot know when the others are finished.
    """
    from mega_data.executors.slurm import refuse_whole_run

    if only is None and not is_whole_run(executor, only):
        refuse_whole_run(stages)
    if only == "plan":
        record_stages(stages)


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


class TaskJob(Protocol):
    """A run that is divided into tasks."""

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one."""

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""


def run_job(
    job: TaskJob,
    folder: Path,
    *,
    executor: str,
    workers: int,
    only: str | None,
    errors: ErrorCount,
    marked: tuple[Path, str] | None = None,
) -> list[list[TaskResult]] | None:
    """Begin or resume a run in its work folder, and run its stages, see `run_stages`.

    Args:
        marked: output folder that gets the marker of a command, and the command.

    Raises:
        ConfigError: the folder holds another run, or this is an element of a job array without a stage.
        FormatError: an input has changed since the run began.
    """
    from mega_data.task_stages import select_stages

    stages = job.stages()
    check_has_stage(executor, only, (stage.name for stage in stages))
    select_stages(stages, only)  # refuses an unknown stage before the folder of the run is there
    job.begin()
    if marked is not None:
        mark_output(*marked, only)
    with check_inputs_unchanged(folder):
        return run_stages(stages, folder, executor=executor, workers=workers, only=only, errors=errors)


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

    from mega_data.commands.task_progress import task_progress
    from mega_data.executors.dispatch import execute
    from mega_data.task_stages import read_result

    with ExitStack() as bars:

        def progress(stage: TaskStage, tasks: Sequence[int]) -> Callable[[TaskResult], None]:
            for task in set(stage.own_tasks).difference(tasks):
                errors.add(read_result(stage, task, folder))
            bars.close()  # that of the stage before
            if not tasks:
                return errors.add
            show = bars.enter_context(task_progress(f"{label}{stage.name}", stage, tasks))

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


class RepeatableOptionCommand(MultiValueCommand):
    """A command whose repeatable options take several words, as Megatron's: `--input a b`. Repeats add up.

    It has no positional arguments, so a word after an option belongs to that option.
    """

    repeats_add_up = True

    def is_multi_value(self, param: click.Parameter) -> bool:
        return isinstance(param, click.Option) and param.multiple
