"""Options of tasks that show examples before a question. Imports neither torch nor numpy, for `--help`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from mega_eval.commands.task_options import PATH
from mega_eval.tasks.fewshot import SAMPLERS
from mega_schema.app.click_options import add_options


def fewshot_options(sampler: str = "shared") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add --num-fewshot, --fewshot-data, --fewshot-seed and --fewshot-sampler to a command.

    Args:
        sampler: the default of --fewshot-sampler.
    """
    options = (
        click.option(
            "--num-fewshot",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Examples before each question; a question is never its own example.",
        ),
        click.option(
            "--fewshot-data",
            type=PATH,
            help="File of the examples, in the layout of --data.  [default: --data]",
        ),
        click.option(
            "--fewshot-seed",
            type=int,
            default=1234,
            show_default=True,
            help="Seed of the draw of examples.",
        ),
        click.option(
            "--fewshot-sampler",
            type=click.Choice(SAMPLERS),
            default=sampler,
            show_default=True,
            help="shared: one draw for all questions. first: the first examples of the file. random: a draw "
            "for each question, that of lm-evaluation-harness.",
        ),
    )

    return partial(add_options, options=options)
