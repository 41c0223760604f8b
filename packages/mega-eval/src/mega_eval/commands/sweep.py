"""`mega-eval sweep`: evaluate every checkpoint of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_eval.number_format import format_number
from mega_schema.app.click_options import LocalPath, NumberRange
from mega_schema.app.output_option import OUTPUT_FOLDER

if TYPE_CHECKING:
    from mega_eval.sweep import MetricSpread, SweepPoint

_CHART = "sweep.png"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=LocalPath(), metavar="RUN")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TASK [TASK OPTIONS]...")
@click.option("--output", type=OUTPUT_FOLDER, help="Folder of the results.  [default: sweep-TASK-RUN]")
@click.option("--overwrite", is_flag=True, help="Evaluate checkpoints again that have a result.")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Checkpoints at the end over which mean and standard deviation are taken.",
)
@click.option("--follow", is_flag=True, help="Wait for more checkpoints until the run ends, or Ctrl-C.")
@click.option("--until", type=click.IntRange(min=0), help="Evaluate no checkpoint after this iteration.")
@click.option(
    "--poll-seconds",
    type=NumberRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds between two searches for new checkpoints.",
)
@click.option("--no-plot", is_flag=True, help="Draw no chart, which needs matplotlib.")
@click.pass_context
def sweep(
    context: click.Context,
    run: Path,
    words: tuple[str, ...],
    output: Path | None,
    overwrite: bool,
    last: int,
    follow: bool,
    until: int | None,
    poll_seconds: float,
    no_plot: bool,
) -> None:
    """Evaluate every checkpoint of the run in the folder RUN, and draw each metric against tokens.

    TASK is a command of mega-eval with its options, without --load and --output. Repeat the command to go on:
    a checkpoint is not evaluated again if its weights, its data and the options are the same.
    """
    from mega_eval.charts import draw_sweep, require_matplotlib
    from mega_eval.input_paths import build_path_error
    from mega_eval.outputs import check_folder
    from mega_eval.sweep import RECORD, Sweep, follow_run, read_record
    from mega_schema.errors import MegaError
    from mega_schema.outputs import check_output

    command = _find_task(context, words)
    folder = output or Path(f"sweep-{words[0]}-{run.resolve().name}")
    check_output(
        "--output", folder, "folder", inputs=[run], is_ours=lambda path: read_record(path) is not None
    )
    if not run.is_dir():
        raise build_path_error(run, "folder", "the folder of a run")
    check_folder("--output", folder.parent)
    tasks = Sweep(run, folder, words, last=last, overwrite=overwrite)
    if not no_plot:
        require_matplotlib("sweep", hint="or add --no-plot")
    command.make_context(words[0], [*words[1:], "--load", str(run)])  # a wrong option leaves nothing behind

    def evaluate(checkpoint: Path, result: Path) -> None:
        options = ["--load", str(checkpoint), "--output", str(result), "--overwrite"]
        command.main([*words[1:], *options], prog_name=words[0], standalone_mode=False)

    def add(iteration: int) -> None:
        if not tasks.add(iteration, evaluate):
            click.echo(f"iteration {iteration}: {tasks.result_path(iteration)} is there already")
        if not no_plot:
            draw_sweep(tasks.points, tasks.measure_spread(), folder / _CHART)

    tasks.create_folder()
    try:
        reason = follow_run(tasks, add, follow=follow, until=until, sleep=time.sleep, seconds=poll_seconds)
    except MegaError:
        tasks.remove_empty_folder()
        raise
    finally:
        for line in format_sweep(tasks.points, tasks.measure_spread()):
            click.echo(line)
    click.echo(f"{reason}; written to {folder / RECORD}")


def _find_task(context: click.Context, words: Sequence[str]) -> click.Command:
    """Return the command of the task.

    Raises:
        ConfigError: it is not a task, or its options name a model or an output.
    """
    from mega_schema.errors import ConfigError

    group = context.parent.command if context.parent is not None else None
    assert isinstance(group, click.Group)
    tasks = [
        name
        for name, command in group.commands.items()
        if {"load", "overwrite"} <= {parameter.name for parameter in command.params}
    ]
    if words[0] not in tasks:
        close = get_close_matches(words[0], tasks, 1)
        hint = f"did you mean {close[0]}?" if close else "mega-eval tasks"
        raise ConfigError("TASK", "not a task", found=words[0], wanted=" | ".join(tasks), hint=hint)
    for option in ("--load", "--url"):
        if any(word == option or word.startswith(f"{option}=") for word in words):
            raise ConfigError(option, "the sweep chooses the checkpoint", hint=f"leave {option} out")
    return group.commands[words[0]]


def format_sweep(points: Sequence[SweepPoint], spread: dict[str, MetricSpread]) -> Iterator[str]:
    """Yield the lines of a table: a row for each checkpoint, then mean and deviation of the last ones."""
    if not points:
        return
    names = list(points[-1].metrics)
    rows = [["iteration", "tokens", *(name.replace("_", " ") for name in names)]]
    for point in points:
        tokens = "" if point.tokens is None else f"{point.tokens:,}"
        values = (point.metrics.get(name) for name in names)
        rows.append(
            [f"{point.iteration:,}", tokens, *("" if v is None else format_number(v.value) for v in values)]
        )
    count = max(item.checkpoints for item in spread.values())
    rows.append([f"mean of {count}", "", *(format_number(spread[name].mean) for name in names)])
    deviations = (spread[name].stdev for name in names)
    rows.append(["deviation", "", *("" if d is None else format_number(d) for d in deviations)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
