"""The command line of mega-serve. A command is imported when it is used, so that `--help` answers at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

import click

from mega_schema.app.cli_runner import run_command
from mega_schema.errors import ConfigError
from mega_serve import __version__

# command -> (module, name in it, help)
_COMMANDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "serve": ("serve", "serve", "Serve requests over HTTP; the default command."),
        "generate": ("offline", "generate", "Generate text offline, from a batch file or as samples."),
        "chat": ("chat", "chat", "Chat with a server in the terminal."),
        "complete": ("complete", "complete", "Continue a prompt on a server."),
        "bench": ("bench", "bench", "Measure a server under load."),
    }
)


class LazyGroup(click.Group):
    """A group whose commands are imported on use, with a default: `mega-serve --load DIR` serves."""

    default_command = "serve"

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"mega_serve.commands.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names.

        Raises:
            ConfigError: there is no such command.
        """
        name = args[0]
        if name not in _COMMANDS:
            near = get_close_matches(name, _COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else ""
            if not near and Path(name).is_dir():  # the checkpoint without its flag
                hint = f"mega-serve --load {name}"
            raise ConfigError(name, "no such command", wanted=" | ".join(_COMMANDS), hint=hint)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command before its options."""
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, _, help) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-serve")
def commands() -> None:
    """Serve a checkpoint over HTTP, or generate text with it.

    `mega-serve --load DIR` is short for `mega-serve serve --load DIR`.
    """


def main() -> None:
    """Run the program `mega-serve`."""
    run_command(commands)
