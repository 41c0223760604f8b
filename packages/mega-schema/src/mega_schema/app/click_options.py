"""Options and commands of click that configurations need: several words after one flag, paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import click

from mega_schema.errors import ConfigError
from mega_schema.urls import check_local


def add_options(
    command: Callable[..., Any], options: Iterable[Callable[[Callable[..., Any]], Callable[..., Any]]]
) -> Callable[..., Any]:
    """Add options to a command; `--help` lists them in this order."""
    for decorate in reversed(list(options)):
        command = decorate(command)
    return command


def flag_of(parameter: click.Parameter) -> str:
    """Return the long form of an option, or an argument's name as `--help` shows it."""
    if not isinstance(parameter, click.Option):
        return parameter.metavar or parameter.opts[0].upper()
    return next((flag for flag in parameter.opts if flag.startswith("--")), parameter.opts[0])


class LocalPath(click.Path):
    """A path of this machine to read; a URL is refused before it is taken for a relative path."""

    def __init__(self, *, exists: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        check_local(flag_of(param) if param else "", value)
        return super().convert(value, param, ctx)


class NumberRange(click.FloatRange):
    """A number within bounds; click's own range lets NaN pass, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class NonEmptyPath(LocalPath):
    """A path that is not empty: an unset shell variable would mean the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty: wanted a path; hint: is a shell variable unset?", param, ctx)
        return super().convert(value, param, ctx)


class MultiValueCommand(click.Command):
    """A command whose multi-value flags take all words up to the next flag.

    Attributes:
        repeats_add_up: a repeated multi-value flag adds values; if not, its last occurrence counts.
    """

    repeats_add_up: ClassVar[bool] = False

    def is_multi_value(self, param: click.Parameter) -> bool:
        return isinstance(param, MultiOption)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with one flag for each value.

        Raises:
            ConfigError: a multi-value flag has no value.
        """
        multi_flags = {opt for param in self.params if self.is_multi_value(param) for opt in param.opts}
        plain: list[str] = []
        values_of: dict[str, list[str]] = {}
        current: list[str] | None = None
        for word in args:
            flag, equals, value = word.partition("=")
            if flag in multi_flags:
                current = values_of.setdefault(flag, [])
                if not self.repeats_add_up:
                    current.clear()
                current += [value] if equals else []
            elif current is not None and not _is_flag(word):
                current.append(word)
            else:
                current = None
                plain.append(word)
        for flag, values in values_of.items():
            if not values:
                raise ConfigError(flag, "needs a value")
            for value in values:
                plain += [flag, value]
        return super().parse_args(ctx, plain)


class MultiOption(click.Option):
    """An option whose words `MultiValueCommand` passes to click one by one."""


def _is_flag(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"  # "-" is stdin
    return False
