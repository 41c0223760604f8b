"""What the commands share: path types, options of several words, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)
WORKERS = click.IntRange(min=1)
EXECUTOR = click.Choice(["local", "slurm-array", "ray"])


class Spreading(click.Command):
    """A command whose repeatable options also take several words, as Megatron's: `--input a b` and so on.

    It has no arguments of its own, so a word after an option can only be meant for that option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = [o for o in self.params if isinstance(o, click.Option) and o.multiple]
        repeatable = {name for option in several for name in option.opts}
        spread, option, values = list[str](), "", 0
        for word in args:
            if word.startswith("-"):
                option, values = word, 0
            elif option in repeatable:
                values += 1
                if values > 1:
                    spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar of bytes on stderr, where a person looks at it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda size: bars.advance(task, size)
