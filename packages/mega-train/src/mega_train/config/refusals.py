"""Collect all errors of a configuration, so that a user sees all of them at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from mega_schema.errors import ConfigError, MegaError

P = ParamSpec("P")
T = TypeVar("T")
_HINT = "mega-train explain FLAG"
_WIDE = 160  # columns of a table that is not shown on a terminal


class RefusedRunError(ConfigError):
    """Several errors in one; its message counts and names them, and `show_table` prints each."""

    errors: tuple[MegaError, ...] = ()

    @classmethod
    def combine(cls, errors: Sequence[MegaError], where: str, what: str) -> RefusedRunError:
        """Combine several errors.

        Args:
            what: text that follows the number of errors in the message.
        """
        names = ", ".join(dict.fromkeys(str(error.where) for error in errors))
        refused = cls(where, f"{len(errors)} {what}, listed above", found=names, hint=_HINT)
        refused.errors = tuple(errors)
        return refused


class Refusals:
    """Collector of configuration errors, in the order found; only the first of each flag.

    Attributes:
        unknown: flags without a known value because of an earlier error: errors about them are dropped.
    """

    def __init__(self) -> None:
        self.errors: list[MegaError] = []
        self.unknown: set[str] = set()

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call the function and return its value, or collect its error and return None."""
        try:
            return function(*args, **kwargs)
        except MegaError as error:
            self.extend(parts(error))
            return None

    def extend(self, errors: Iterable[MegaError]) -> bool:
        """Collect all errors, including one that the iterable raises. Returns whether there were none."""
        is_valid = True
        try:
            for error in errors:
                is_valid = False
                self._add(error)
        except MegaError as error:
            is_valid = False
            self._add(error)
        return is_valid

    def raise_any(self) -> None:
        """Raise the collected errors, if any.

        Raises:
            MegaError: the error, or a RefusedRunError of several.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise RefusedRunError.combine(self.errors, "run", "values are refused")

    def _add(self, error: MegaError) -> None:
        where = str(error.where)
        if where not in self.unknown and where not in {str(earlier.where) for earlier in self.errors}:
            self.errors.append(error)


def parts(error: MegaError) -> tuple[MegaError, ...]:
    """Return the parts of a combined error; for any other error, the error itself."""
    return error.errors if isinstance(error, RefusedRunError) else (error,)


def show_table(errors: Sequence[MegaError]) -> None:
    """Print a table of errors to stderr: flag, reason and replacement."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    # a flag must stay on one line to be copied; a path may be longer than the table
    whole = max(len(str(error.where)) for error in errors) <= _WIDE // 2
    table.add_column("flag", justify="left", overflow="fold", no_wrap=whole)
    for heading in ("why", "instead"):
        table.add_column(heading, justify="left", overflow="fold")
    for error in errors:
        where = str(error.where)
        why = str(error).partition("; hint: ")[0].removeprefix(f"{where}: ")
        table.add_row(Text(where), Text(why), Text(error.hint))
    width = None if sys.stderr.isatty() else _WIDE
    Console(file=sys.stderr, width=width, highlight=False).print(table)
