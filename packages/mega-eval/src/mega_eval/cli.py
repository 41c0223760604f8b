"""The command line of mega-eval."""

from __future__ import annotations

from typing import NoReturn

import click

from mega_eval import __version__
from mega_eval.commands.choice_commands import COMMANDS as CHOICE_COMMANDS
from mega_eval.commands.classification_commands import classify
from mega_eval.commands.compare import compare
from mega_eval.commands.contamination import contamination
from mega_eval.commands.core_command import core
from mega_eval.commands.generation_commands import nq, squad
from mega_eval.commands.harness import harness
from mega_eval.commands.lambada_command import lambada
from mega_eval.commands.megatron11b_command import megatron11b
from mega_eval.commands.megatron_main import TASKS as MEGATRON_TASKS
from mega_eval.commands.megatron_main import main as main_task
from mega_eval.commands.perplexity_command import perplexity
from mega_eval.commands.report import report
from mega_eval.commands.sweep import sweep
from mega_eval.commands.task_list import tasks
from mega_eval.commands.word_level import ptb, wikitext2, wikitext103
from mega_schema.app import cli_runner
from mega_schema.errors import ConfigError


class _Tasks(click.Group):
    """The commands of mega-eval; a task of Megatron's is an error with its command as hint."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name in MEGATRON_TASKS:
            hint = f"mega-eval main --task {name} --valid-data FILE, or mega-eval {name.lower()}"
            raise ConfigError(name, "is the name of one of Megatron's tasks", hint=hint)
        return super().resolve_command(ctx, args)


@click.group(cls=_Tasks, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-eval")
def cli() -> None:
    """Evaluate a language model. Each task prints a table and writes a JSON result."""


for command in (
    lambada,
    wikitext103,
    wikitext2,
    ptb,
    perplexity,
    megatron11b,
    *CHOICE_COMMANDS,
    nq,
    squad,
    classify,
    core,
    harness,
    main_task,
    report,
    compare,
    contamination,
    sweep,
    tasks,
):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the program `mega-eval`."""
    cli_runner.run_command(cli)
