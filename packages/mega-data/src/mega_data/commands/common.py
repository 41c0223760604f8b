"""What the commands share: path types, options of several words, a progress bar."""

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
    from mega_data.task_stages import Result, Stage

EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)
WORKERS = click.IntRange(min=1)
LINES = 50  # of a stage in a log
SECONDS_A_LINE = 10.0  # between two lines of progress in a log
EXECUTOR = click.Choice(["local", "slurm-array", "ray"])
ON_ERROR = click.Choice(["fail", "skip"])
LAST_CALL = "the last call, without --only, gives the files their names."  # of --only
FOLDER = click.Path(file_okay=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])


def inputs_option(what: str) -> Callable[[Command], Command]:
    """`--input` of the commands whose tasks are files."""
    return click.option("--input", "inputs", multiple=True, required=True, help=what)


def max_errors_option(rows: str, share: str = "of all") -> Callable[[Command], Command]:
    """`--max-errors` of the commands that have `--on-error`; a share is `share` that are read."""
    what = f"With --on-error skip: end the run when more {rows} than N are wrong, or than N% {share} read."
    return click.option("--max-errors", metavar="N|N%", help=what)


def error_limit(on_error: str, text: str | None) -> ErrorLimit:
    """The limit that the flags name.

    Raises:
        ConfigError: it is none, or wrong rows end the run anyway.
    """
    from mega_data.error_limit import OPTION, ErrorLimit
    from mega_schema.errors import ConfigError

    if text is None:
        return ErrorLimit()
    if on_error != "skip":
        hint = f"--on-error skip {OPTION} {text}"
        raise ConfigError(OPTION, "says nothing without --on-error skip", hint=hint)
    return ErrorLimit.parse(text)


def documents_options(command: Command) -> Command:
    """The flags of the commands that read a corpus of JSON lines or tables and write JSON lines."""
    what = "JSON lines or .parquet, also .gz .zst .xz .bz2 .lz4; files, globs, folders, saved datasets."
    options = (
        click.option("--input", "inputs", multiple=True, required=True, help=what),
        click.option("--json-key", default="text", help="Key of the text."),
        click.option(
            "--id-key", default="", show_default=False, help="Key of each document's id, for dropped/."
        ),
        click.option("--on-error", type=ON_ERROR, default="fail", help="At a line that is no document."),
        max_errors_option("lines"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def exit_if_nothing_left(left: int, given: int) -> None:
    """End with exit code 1 where a command wrote no document, for a script that goes on to the next step.

    Raises:
        SystemExit: there is none.
    """
    if left:
        return
    why = f"none of {given:,} documents is left" if given else "the inputs hold no document"
    click.echo(f"note: {why}: exit code 1", err=True)
    raise SystemExit(1)


def tell_replaced(prefix: Path) -> None:
    """Say that a dataset is there already, and that this run replaces it."""
    click.echo(f"note: {prefix}: a dataset is there already; it is replaced when this run ends", err=True)


def tell_skipped(count: int, folder: Path) -> None:
    """Say how many lines are in the quarantine, where there are any."""
    if count:
        click.echo(f"note: {count:,} lines were passed over, see {folder}", err=True)


@contextmanager
def work_folder(given: Path | None, usual: Path, output: Path, *, alone: bool, lock: Path) -> Iterator[Path]:
    """The folder of a run's intermediate files, while no other run writes to its output.

    Args:
        given: by a person, else `usual`.
        alone: this process does all of the run.
        lock: the folder that is locked.

    Raises:
        ConfigError: another run writes there.
    """
    from mega_data.output_folder import keeping_good_shards, locked

    folder = given or usual
    with locked(lock, shared=not alone), keeping_good_shards(folder, output, alone=alone and given is None):
        yield folder


def is_alone(executor: str, only: str | None) -> bool:
    """Whether a process is to do all of a run."""
    return only is None and executor != "slurm-array"


def check_has_stage(executor: str, only: str | None, stages: Iterable[str]) -> None:
    """Refuse an element of a job array that is told no stage, before it makes the folder of the run.

    Raises:
        ConfigError: it is told none; it cannot know when the others have done theirs.
    """
    from mega_data.executors.slurm import refuse_all

    if only is None and not is_alone(executor, only):
        refuse_all(stages)


@contextmanager
def unchanged_inputs(folder: Path) -> Iterator[None]:
    """Around the tasks of a run: an input that changes between or during them ends the run.

    Args:
        folder: work folder of the run.

    Raises:
        FormatError: an input is not what it was when the run began.
    """
    from mega_data.jsonl_shards import check_identity
    from mega_data.task_stages import planned_inputs

    inputs = planned_inputs(folder)
    try:
        yield
    except Exception:  # may be what comes of the change, whatever it is
        check_identity(inputs)
        raise
    check_identity(inputs)


def run_stages(
    stages: Sequence[Stage],
    folder: Path,
    *,
    executor: str,
    workers: int,
    only: str | None,
    errors: ErrorCount,
    told: str = "",
) -> list[list[Result]] | None:
    """Run stages where the flags say; a line on stderr, that begins with `told`, after each finished task.

    Args:
        errors: counts the rows that the tasks pass over, those of earlier processes included.

    Raises:
        TooManyErrors: they are more than its limit.
    """
    import os

    from mega_data.executors.dispatch import execute
    from mega_data.task_stages import result

    def progress(stage: Stage, tasks: Sequence[int]) -> Callable[[Result], None]:
        for task in set(stage.mine).difference(tasks):
            errors.add(result(stage, task, folder))
        tell = Tasks(f"{told}{stage.name}", stage, tasks)

        def end_task(done: Result) -> None:
            tell(done)
            errors.add(done)

        return end_task

    found = execute(
        stages,
        folder,
        executor=executor,
        workers=workers,
        only=only,
        environment=os.environ,
        progress=progress,
    )
    if found is not None:
        errors.end_pass()
    return found


class Tasks:
    """Tasks done of a stage and the time left, and where its bytes are known their rate.

    A terminal has one line, written again. A log has a line for each task. Where a stage has more than LINES
    of them, or their bytes are not known, a log has one every SECONDS_A_LINE, and the last.
    """

    def __init__(
        self, what: str, stage: Stage, tasks: Sequence[int], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self.now, self.began = what, now, now()
        self.tasks, self.before = len(stage.mine), len(stage.mine) - len(tasks)
        self.count = self.before
        self.size = sum(stage.sizes[task] for task in tasks) if stage.sizes else 0
        self.read = self.documents = 0
        self.last = float("-inf") if self.size else self.began

    def __call__(self, result: Result) -> None:
        self.count += 1
        now = self.now()
        line = f"{self.what} {self.count}/{self.tasks}"
        if self.size:
            self.read += result["read"]
            self.documents += result["documents"]
            rate = self.read / max(now - self.began, 1e-9)
            line += f": {self.read / 1e6:.1f} of {self.size / 1e6:.1f} MB, {self.documents:,} documents"
            line += f", {rate / 1e6:.1f} MB/s"
            if rate:  # empty files tell none
                line += f", {(self.size - self.read) / rate:.0f} s left"
        else:
            seconds = (now - self.began) / (self.count - self.before)
            line += f": {(self.tasks - self.count) * seconds:.0f} s left"
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", err=True, nl=self.count == self.tasks)
        elif self._is_due(now):
            self.last = now
            click.echo(line, err=True)

    def _is_due(self, now: float) -> bool:
        each = self.size and self.tasks <= LINES
        return bool(each) or self.count == self.tasks or now - self.last >= SECONDS_A_LINE


class Spreading(click.Command):
    """A command whose repeatable options also take several words, as Megatron's: `--input a b` and so on.

    It has no arguments of its own, so a word after an option can only be meant for that option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = [o for o in self.params if isinstance(o, click.Option) and o.multiple]
        repeatable = {name for option in several for name in option.opts}
        spread, option, values = list[str](), "", 0
        for word in args:
            if word.startswith("-") and word != "-":  # which is stdin
                option, values = word, 0
            elif option in repeatable:
                values += 1
                if values > 1:
                    spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[..., object]]:
    """What is called with the bytes, and the documents if they are counted, done since its last call.

    Bytes, documents, rate and time left are shown: as a bar where stderr is a terminal, else a line at times.
    """
    if not sys.stderr.isatty():
        yield _Lines(what, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    counted = "{task.fields[documents]}"
    columns = (BarColumn(), DownloadColumn(), counted, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("{task.description}", *columns, console=Console(stderr=True), transient=True) as bars:
        task, seen = bars.add_task(what, total=total or None, documents=""), 0

        def told(size: int, documents: int = 0) -> None:
            nonlocal seen
            seen += documents
            bars.update(task, advance=size, documents=f"{seen:,} documents" if seen else "")

        yield told


class _Lines:
    """Progress for a log file: a line every ten seconds.

    The rate is that since the first call: what it tells is what an earlier run did, or came of the start.
    """

    def __init__(self, what: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.now, self.done, self.documents = what, total, now, 0, 0
        self.first, self.began = 0, 0.0
        self.told = now()

    def __call__(self, size: int, documents: int = 0) -> None:
        now = self.now()
        if not self.done:
            self.first, self.began = size, now
        self.done += size
        self.documents += documents
        if now - self.told < SECONDS_A_LINE or now <= self.began:
            return
        self.told = now
        rate = (self.done - self.first) / (now - self.began)
        left = f", {max(self.total - self.done, 0) / rate:.0f} s left" if self.total and rate else ""
        of = f" of {self.total / 1e6:.1f}" if self.total else ""
        counted = f", {self.documents:,} documents" if self.documents else ""
        line = f"{self.what}: {self.done / 1e6:.1f}{of} MB{counted}, {rate / 1e6:.1f} MB/s{left}"
        click.echo(line, err=True)
