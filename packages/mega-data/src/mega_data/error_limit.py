"""How many rows `--on-error skip` may pass over, before it is the corpus that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from mega_schema.errors import ConfigError, FormatError

OPTION: Final = "--max-errors"
ERRORS: Final = "errors"  # key of the counts in the result of a task


class TooManyErrors(FormatError):
    """More rows were passed over than the limit allows. What is finished stays for the next run."""


@dataclass(frozen=True, slots=True)
class ErrorLimit:
    """The rows that may be passed over; without a number, any.

    Attributes:
        count: of rows, checked while they are read.
        share: of the rows that were read, from 0 to 1, checked when all were.
    """

    count: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """A limit from `100` or `1%`.

        Raises:
            ConfigError: the text is neither.
        """
        number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
        try:
            if percent and 0 <= (share := float(number)) <= 100:
                return cls(share=share / 100)
            if not percent and (count := int(number)) >= 0:
                return cls(count=count)
        except ValueError:
            pass
        wanted = "a number of rows, as 100, or a share of them, as 1%"
        raise ConfigError(OPTION, "no limit", found=text, wanted=wanted)

    def check(self, count: int, first: Callable[[], str], rows: int | None = None) -> None:
        """Refuse a count of rows that is above the limit.

        Args:
            count: of the rows that were passed over.
            first: gives the place of the first of them, and what is wrong with it.
            rows: that were read, where all were.

        Raises:
            TooManyErrors: the count is above the limit.
        """
        if self.count is not None and count > self.count:
            found, wanted = f"{count:,}", f"at most {self.count:,}"
        elif (
            rows and self.share is not None and count > round(self.share * rows, 6)
        ):  # 0.29 * 100 is below 29
            found, wanted = f"{count:,} of {rows:,}", f"at most {self.share * 100:g}%"
        else:
            return
        what, hint = f"too many rows are wrong, the first is {first()}", "mend the rows, or raise the limit"
        raise TooManyErrors(OPTION, what, found=found, wanted=wanted, hint=hint)


@dataclass(slots=True)
class ErrorCount:
    """The rows that the tasks of a run have passed over.

    Attributes:
        count: of those rows, in all passes over the corpus.
        rows: that the first pass read.
        first: of those rows, in the order in which the tasks ended.
    """

    limit: ErrorLimit
    count: int = 0
    rows: int = 0
    first: str = ""
    _is_first_pass: bool = field(default=True)

    def add(self, result: Mapping[str, Any]) -> None:
        """Count what a task has passed over.

        Raises:
            TooManyErrors: the count is above the limit.
        """
        if ERRORS not in result:
            return
        errors = result[ERRORS]
        self.count += errors["count"]
        self.first = self.first or errors["first"]
        if self._is_first_pass:
            self.rows += errors["rows"]
        self.limit.check(self.count, lambda: self.first)

    def end_pass(self) -> None:
        """Check the share, as all rows were read. A later pass reads what this one left, and adds no rows.

        Raises:
            TooManyErrors: the share is above the limit.
        """
        self._is_first_pass = False
        self.limit.check(self.count, lambda: self.first, self.rows)


def error_counts(count: int, first: str, rows: int) -> dict[str, Any]:
    """What the result of a task that reads an input says of the rows it has passed over.

    Args:
        rows: that it has read, those included.
    """
    return {ERRORS: {"count": count, "first": first, "rows": rows}}
