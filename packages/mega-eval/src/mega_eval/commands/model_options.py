"""The options of a task that name its model, for commands whose results are another program's."""

from __future__ import annotations

from collections.abc import Mapping

import click

from mega_eval.commands.task_options import TaskOptions, task_options

# those of the result and of its interrupted runs, which the other program writes and resumes itself
RESULT_OPTIONS = frozenset({"output", "overwrite", "report", "limit", "cache", "no_cache"})


@click.command("model")
@task_options
def _model(**values: object) -> None:
    """Hold the options; only their parser is used."""


def model_options() -> list[click.Parameter]:
    """Return the options that name a model."""
    return [option for option in _model.params if option.name not in RESULT_OPTIONS]


def option_flags() -> frozenset[str]:
    """Return the flags of all options of a task."""
    return frozenset(flag for option in _model.params for flag in option.opts)


def build_options(values: Mapping[str, object]) -> TaskOptions:
    """Build the options of a task from some of their values by name; the others have their defaults.

    Raises:
        click.ClickException: a name is not an option, a value is not one of it, or --load is missing.
    """
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return TaskOptions(**_model.make_context("model", words).params)
