"""The command line of mega-eval."""

from __future__ import annotations

from typing import NoReturn

import click

from mega_eval import __version__
from mega_eval.commands import choice_commands, likelihood
from mega_eval.commands.compare import compare
from mega_eval.commands.report import report
from mega_eval.commands.sweep import sweep
from mega_schema.app import cli_runner


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-eval")
def cli() -> None:
    """Evaluate a language model. Each task prints a table and writes a JSON result."""


for command in (
    likelihood.lambada,
    likelihood.wikitext103,
    likelihood.perplexity,
    *choice_commands.COMMANDS,
    report,
    compare,
    sweep,
):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the program `mega-eval`."""
    cli_runner.run_command(cli)
