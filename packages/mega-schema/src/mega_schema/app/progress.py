"""Show the progress of a command on stderr: a bar on a terminal, a line every ten seconds in a log.

With MEGA_PROGRESS=json each line, also on a terminal, is a JSON object for another program.

rich draws the bar. It is imported when a bar is opened on a terminal, so `--help`, worker processes and jobs
without a terminal do not load it. A package whose commands show progress depends on it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from mega_schema.app.counts import format_count
from mega_schema.errors import ConfigError, escape_controls

if TYPE_CHECKING:
    from rich.live import Live

PROGRESS_VARIABLE = "MEGA_PROGRESS"
SECONDS_PER_LINE = 10.0  # between two lines in a log
_SECONDS_PER_FRAME = 0.1  # between two updates of a bar
_GB_FROM = 10_000_000_000  # bytes; smaller totals are in MB
_NO_BAR_TERMINALS = ("dumb", "unknown")  # values of TERM: no cursor movement


class ProgressBar:
    """A progress display: the amount done, the rate and the time left.

    The rate counts from the first call on. The amount of that call is not part of it: an earlier run may have
    done it.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        unit: str | None = "bytes",
        show: Callable[[ProgressBar], None] | None = None,
        interval: float = SECONDS_PER_LINE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a display at zero.

        Args:
            total: the amount to do; None if it is unknown.
            unit: what is counted, in the plural. None: only the time left is shown.
            show: shows the bar; None prints a line.
            interval: seconds between two calls of `show`.
        """
        self.label = escape_controls(label)
        self.total = total
        self.completed = self.documents = 0
        self._unit = unit
        self._show = show or _print_line
        self._interval = interval
        self._now = now
        self._last_shown = now()
        self._first_call: tuple[float, int] | None = None  # time and amount
        self._rate: float | None = None  # per second

    def __call__(self, amount: int, documents: int = 0, *, label: str = "", show: bool = False) -> None:
        """Count what was done since the last call.

        Args:
            documents: counted beside the amount and shown with it, if there are any.
            label: the new label; "" keeps the current one.
            show: show this state even if the last one was shown a moment ago.
        """
        now = self._now()
        self.label = escape_controls(label) or self.label
        self.completed += amount
        self.documents += documents
        if self._first_call is None:
            self._first_call = now, amount
        start, completed_at_start = self._first_call
        self._rate = (self.completed - completed_at_start) / (now - start) if now > start else None
        if show or now - self._last_shown >= self._interval:
            self._last_shown = now
            self._show(self)

    def format_numbers(self) -> str:
        """Format amounts, rate and time left, as far as they are known."""
        parts = [] if self._unit is None else [self._format_amount()]
        if self.documents:
            parts.append(format_count(self.documents, "document"))
        if self._rate is not None and self._unit is not None:
            is_bytes = self._unit == "bytes"
            parts.append(f"{self._rate / 1e6:.1f} MB/s" if is_bytes else f"{self._rate:,.1f} {self._unit}/s")
        if (seconds := self._seconds_left()) is not None:
            parts.append(_format_time_left(seconds))
        return ", ".join(parts)

    def to_json(self) -> dict[str, object]:
        """Return the label and the numbers; those that are unknown are None."""
        seconds = self._seconds_left()
        return {
            "label": self.label,
            "completed": self.completed,
            "total": self.total,
            "unit": self._unit,
            "documents": self.documents,
            "per_second": None if self._rate is None else round(self._rate, 3),
            "seconds_left": None if seconds is None else round(seconds, 1),
        }

    def _seconds_left(self) -> float | None:
        if self.total is None or self._first_call is None:
            return None
        remaining = max(self.total - self.completed, 0)
        if not self._rate:
            return None if remaining else 0.0
        return remaining / self._rate

    def _format_amount(self) -> str:
        if self._unit != "bytes":
            return f"{self.completed:,}{'' if self.total is None else f' of {self.total:,}'} {self._unit}"
        is_large = max(self.completed, self.total or 0) >= _GB_FROM
        size, name = (1e9, "GB") if is_large else (1e6, "MB")
        total = "" if self.total is None else f" of {self.total / size:.1f}"
        return f"{self.completed / size:.1f}{total} {name}"


@contextmanager
def progress_bar(
    label: str, total: int | None, *, unit: str | None = "bytes", transient: bool = True
) -> Iterator[ProgressBar]:
    """Yield a bar to call with every amount that is done.

    Args:
        label: the work; begins the line.
        total: the amount to do; None if it is unknown.
        unit: what is counted, in the plural. None: only the time left is shown.
        transient: erase the bar from the terminal at the end.

    Raises:
        ConfigError: MEGA_PROGRESS is neither `json` nor `text`.
    """
    output_format = os.environ.get(PROGRESS_VARIABLE) or "text"
    if output_format not in ("text", "json"):
        raise ConfigError(PROGRESS_VARIABLE, "no format", found=output_format, wanted="text | json")
    if output_format == "json":
        yield ProgressBar(label, total, unit=unit, show=_print_json)
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") in _NO_BAR_TERMINALS:
        yield ProgressBar(label, total, unit=unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
    )
    # No refresh thread: commands fork. No redirection of stdout: it may be a file.
    console = Console(stderr=True, force_terminal=True)
    display = Progress(
        *columns, console=console, auto_refresh=False, transient=transient, redirect_stdout=False
    )

    def draw(bar: ProgressBar) -> None:
        numbers = bar.format_numbers()
        display.update(task, description=bar.label, completed=bar.completed, numbers=numbers, refresh=True)

    bar = ProgressBar(label, total, unit=unit, show=draw, interval=_SECONDS_PER_FRAME)
    task = display.add_task(bar.label, total=total, numbers=bar.format_numbers())
    try:
        start_live(display.live)
        yield bar
    finally:
        draw(bar)
        display.stop()


def start_live(live: Live) -> None:
    """Start a display of rich with a visible cursor: a killed process could not restore a hidden one."""
    live.start(refresh=True)
    live.console.show_cursor()


def format_duration(seconds: float) -> str:
    """Format a duration as minutes:seconds, or hours:minutes:seconds."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def _format_time_left(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds < 99.5 else f"{format_duration(seconds)} left"


def _print_json(bar: ProgressBar) -> None:
    click.echo(json.dumps(bar.to_json()), err=True)


def _print_line(bar: ProgressBar) -> None:
    numbers = bar.format_numbers()
    click.echo(f"{bar.label}: {numbers}" if numbers else bar.label, err=True)
