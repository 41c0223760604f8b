"""Shows a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from mega_train.metrics import Progress


class Quiet:
    """Shows nothing: the ranks beside the first."""

    def progress(self, now: Progress) -> None:
        pass

    def step(self, iteration: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class Terminal:
    """A bar that moves with every step and a text that changes with every line of the log."""

    def __init__(self, console: Console, iterations: int, done: int) -> None:
        self._live = console.is_terminal
        self._console = console
        self._bar = Bar(
            BarColumn(bar_width=20),  # with the numbers it fits a terminal of 80 columns
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            console=console,
            disable=not self._live,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("training", total=iterations, completed=done, line="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, iteration: int) -> None:
        if self._live:
            self._bar.update(self._task, completed=iteration)

    def progress(self, now: Progress) -> None:
        pace = f"{now.tokens_per_second:,.0f} tokens/s"
        left = f"{_clock(now.seconds_left)} left"
        if self._live:
            self._bar.update(self._task, line=f"{_loss(now)}  {pace}  {left}")
        else:
            norm = "" if now.gradient_norm is None else f" | grad norm {now.gradient_norm:.2f}"
            scale = "" if now.loss_scale == 1 else f" | loss scale {now.loss_scale:g}"
            numbers = f"{_loss(now)} | lr {now.rate:.2e}{norm}{scale}"
            self.say(f"iteration {now.iteration}/{now.iterations} | {numbers} | {pace} | {left}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _loss(now: Progress) -> str:
    loss = "no update" if now.loss is None else f"loss {now.loss:.4f}"
    return f"{loss} ({now.skipped} skipped)" if now.skipped else loss


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
