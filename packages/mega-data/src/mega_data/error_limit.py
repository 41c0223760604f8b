"""Limit the rows that `--on-error skip` may skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from mega_schema.errors import ConfigError, FormatError

OPTION: Final = "--max-errors"
ERRORS: Final = "errors"  # key of the counts in the result of a task


class TooManyErrors(FormatError):
    """More rows were skipped than the limit allows. Finished work is kept for the next run."""


@dataclass(frozen=True, slots=True)
class ErrorLimit:
    """The number of rows that may be skipped; without a number, any.

    A damaged file is above any number: the rows that are lost with it cannot be counted.

    Attributes:
        count: maximum rows, checked while rows are read.
        fraction: maximum fraction of the read rows, from 0 to 1, checked at the end.
    """

    count: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a limit such as `100` or `1%`.

        Raises:
            ConfigError: the text is neither.
        """
        number = text.strip().removesuffix("%")
        percent = text.strip().endswith("%")
        try:
            if percent and 0 <= (percentage := float(number)) <= 100:
                return cls(fraction=percentage / 100)
            if not percent and (count := int(number)) >= 0:
                return cls(count=count)
        except ValueError:
            pass
        wanted = "a number of rows, as 100, or a share of them, as 1%"
        raise ConfigError(OPTION, "no limit", found=text, wanted=wanted)

    def check_damage(self, damaged: str) -> None:
        """Refuse a damaged file if there is a limit.

        Args:
            damaged: the file, and why its rest would be skipped.

        Raises:
            TooManyErrors: there is a limit.
        """
        if self.count is not None or self.fraction is not None:
            hint = f"copy the file again, or run without {OPTION}"
            raise TooManyErrors(OPTION, "any damaged file is above the limit", found=damaged, hint=hint)

    def check(self, count: int, first: Callable[[], str], rows: int | None = None) -> None:
        """Refuse a count of rows that is above the limit.

        Args:
            count: skipped rows.
            first: returns the place and the error of the first skipped row.
            rows: read rows, after all were read.

        Raises:
            TooManyErrors: the count is above the limit.
        """
        if self.count is not None and count > self.count:
            found, wanted = f"{count:,}", f"at most {self.count:,}"
        # rounded: 0.29 * 100 is below 29
        elif rows and self.fraction is not None and count > round(self.fraction * rows, 6):
            found, wanted = f"{count:,} of {rows:,}", f"at most {self.fraction * 100:g}%"
        else:
            return
        what, hint = (
            f"too many rows are wrong, the first is {first()}",
            "correct the rows, or raise the limit",
        )
        raise TooManyErrors(OPTION, what, found=found, wanted=wanted, hint=hint)


@dataclass(slots=True)
class ErrorCount:
    """The rows that the tasks of a run have skipped.

    Attributes:
        count: skipped rows in all passes over the corpus.
        rows: rows that the first pass read.
        first: the first skipped row, in the order in which the tasks ended.
        damaged: the files whose rest was skipped, and why.
    """

    limit: ErrorLimit
    count: int = 0
    rows: int = 0
    first: str = ""
    damaged: list[str] = field(default_factory=list)
    _is_first_pass: bool = field(default=True)

    def add(self, result: Mapping[str, Any]) -> None:
        """Count what a task has skipped.

        Raises:
            TooManyErrors: the count is above the limit, or there is a limit and a file is damaged.
        """
        if ERRORS not in result:
            return
        errors = result[ERRORS]
        self.count += errors["count"]
        self.first = self.first or errors["first"]
        self.damaged += (why for why in errors.get("damaged", ()) if why not in self.damaged)
        if self._is_first_pass:
            self.rows += errors["rows"]
        self.limit.check(self.count, lambda: self.first)
        for why in errors.get("damaged", ()):
            self.limit.check_damage(why)

    def end_pass(self) -> None:
        """Check the fraction after all rows were read. Later passes add no rows.

        Raises:
            TooManyErrors: the fraction is above the limit.
        """
        self._is_first_pass = False
        self.limit.check(self.count, lambda: self.first, self.rows)


def error_counts(count: int, first: str, rows: int, *damaged: str) -> dict[str, Any]:
    """Build the part of a task's result that reports skipped rows.

    Args:
        rows: read rows, including the skipped ones.
        damaged: files whose rest was skipped, and why; "" for none.
    """
    errors: dict[str, Any] = {"count": count, "first": first, "rows": rows}
    reasons = [why for why in damaged if why]
    return {ERRORS: {**errors, "damaged": reasons} if reasons else errors}
