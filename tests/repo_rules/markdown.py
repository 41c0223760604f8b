"""Parse the repository's Markdown: fenced blocks, links, and command lines of our programs."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from tests.repo_rules.repository import PROGRAMS, ROOT, relative_name, tracked_files

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
MODULES = {program.replace("-", "_"): program for program in PROGRAMS}
ENDS = re.compile(r"\|\|?|&&?|;|\d?>>?")  # where the shell's word list of one command is over


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    where: str
    language: str
    text: str


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    return [file for file in tracked_files() if file.suffix == ".md"]


def blocks() -> list[Block]:
    """Every fenced block of every document."""
    result = []
    for file in documents():
        text = file.read_text("utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            result.append(Block(f"{relative_name(file)}:{line}", match[2], match[3]))
    return result


def broken_links(file: Path, text: str) -> list[str]:
    """Links of a document to files that are not there."""
    outside = ("http://", "https://", "mailto:", "#")
    targets = [match[1] for match in LINK.finditer(FENCE.sub("", text)) if not match[1].startswith(outside)]
    return [target for target in targets if not (file.parent / target.partition("#")[0]).exists()]


def commands(block: str) -> Iterator[list[str]]:
    """The words of each command line in a shell block that begins with one of our programs, with torchrun or
    with `python -m` one of ours. Lines that end with a backslash are one with the next.
    """
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"^\s*(\$ )?(\w+=\S+ )*", "", line)
        if not re.match(rf"({'|'.join(PROGRAMS)}|torchrun|python3? -m mega_\w+)\s", line + " "):
            continue
        words = shlex.split(line, comments=True)
        end = next((i for i, word in enumerate(words) if ENDS.fullmatch(word)), len(words))
        yield words[:end]


def check_command(words: list[str]) -> None:
    """Parse a command line as its program would, without running it.

    Raises:
        click.UsageError: a flag does not exist, a value is none of its choices, or a required one is missing.
        MegaError: the same, of a program that says it in its own words.
        SystemExit: torchrun does not know one of its own options.
    """
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        launched = get_args_parser().parse_args(words[1:])
        assert launched.module, f"torchrun without -m: {words}"
        words = [MODULES[launched.training_script], *launched.training_script_args]
    elif words[0].startswith("python"):
        words = [MODULES[words[2]], *words[3:]]
    command, rest, name = program(words[0]), words[1:], words[0]
    if isinstance(command, click.Group) and rest:
        default = getattr(command, "default_command", None)
        if rest[0].startswith("-") and default and rest[0] not in ("--help", "-h", "--version"):
            rest = [default, *rest]
        if not rest[0].startswith("-"):
            subcommands = subcommands_of(command)
            if rest[0] not in subcommands:
                raise click.UsageError(f"{name} has no command {rest[0]}")
            command, rest, name = subcommands[rest[0]], rest[1:], rest[0]
    if {"--help", "-h", "--version"} & set(rest):
        return
    command.make_context(name, rest)


def subcommands_of(group: click.Group) -> dict[str, click.Command]:
    """The commands of a group by name, also of one that imports them when they are used."""
    context = click.Context(group)
    commands_of_group = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in commands_of_group.items() if command is not None}


def program(name: str) -> click.Command:
    """The click command behind a program's name: the one command of its cli.py that no other one holds."""
    module = importlib.import_module(f"{name.replace('-', '_')}.cli")
    commands_of_module = [value for value in vars(module).values() if isinstance(value, click.Command)]
    inner = {
        id(sub)
        for group in commands_of_module
        if isinstance(group, click.Group)
        for sub in subcommands_of(group).values()
    }
    (outer,) = (command for command in commands_of_module if id(command) not in inner)
    return outer


def make_targets() -> set[str]:
    """What the Makefile can make by name."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert phony
    return set(phony[1].split())
