"""The files that a task evaluates: arguments, or values of --data. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from mega_eval.commands.task_options import PATH
from mega_schema.errors import ConfigError


def data_files(help_text: str, metavar: str = "FILE") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the argument FILE and the option --data; the command gets the keywords `paths` and `data`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        argument = click.argument("paths", nargs=-1, type=PATH, metavar=metavar)
        return argument(click.option("--data", multiple=True, type=PATH, help=help_text)(function))

    return decorate


def choose_paths(paths: Sequence[Path], data: Sequence[Path]) -> list[Path]:
    """Return the files of the command line, those of --data last.

    Raises:
        ConfigError: there is none, or one is named twice.
    """
    chosen = [*paths, *data]
    if not chosen:
        raise ConfigError("--data", "missing", wanted="a file", hint="add --data FILE")
    for index, path in enumerate(chosen):
        if path in chosen[:index]:
            raise ConfigError("--data", "names a file twice", found=path, hint="leave one of them out")
    return chosen


def choose_path(paths: Sequence[Path], data: Sequence[Path]) -> Path:
    """Return the file of the command line.

    Raises:
        ConfigError: there is none, or more than one.
    """
    chosen = choose_paths(paths, data)
    if len(chosen) > 1:
        found = " ".join(map(str, chosen))
        raise ConfigError("--data", "more than one file", found=found, wanted="one; each has its own result")
    return chosen[0]
