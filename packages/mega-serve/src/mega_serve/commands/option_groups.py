"""Commands whose `--help` lists the options under headings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mega_schema.app.click_options import MultiOption, MultiValueCommand

_NAME_COLUMNS = 34


class GroupedOption(click.Option):
    """An option with the heading under which `--help` lists it."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedMultiOption(GroupedOption, MultiOption):
    """A grouped option that takes all words up to the next flag."""


class GroupedCommand(MultiValueCommand):
    """A command whose `--help` lists each group of options; those without a group come last."""

    repeats_add_up = True

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order in which their first options are declared."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                groups.setdefault(getattr(param, "group", "Other options"), []).append(record)
        groups["Other options"] = groups.pop("Other options", [])
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=_NAME_COLUMNS)


def option_group(heading: str) -> Callable[..., Callable[..., Any]]:
    """Return a function like `click.option` whose options are listed under `heading`."""

    def option(*names: str, **settings: Any) -> Callable[..., Any]:
        kind = GroupedMultiOption if settings.pop("multi", False) else GroupedOption
        if kind is GroupedMultiOption:
            settings["multiple"] = True
        return click.option(*names, cls=kind, group=heading, **settings)

    return option
