"""Shows a run to a person: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mega_train.telemetry.events import Began, Event, Progress, Said, Stepped, Validated
from mega_train.telemetry.memory import in_use
from mega_train.telemetry.timers import Option

_BAR = 12  # cells a bar needs to tell anything


class Paper(Console):
    """A console whose reader may go away, as `| head` does: rich would end the process then."""

    def on_broken_pipe(self) -> None:
        """
        Raises:
            BrokenPipeError: for whoever writes to take notice of.
        """
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Screen:
    """Lines of the log and, on a terminal, below them a line that moves with every step.

    In the moving line TFLOP/s and memory change with every line of the log.
    """

    def __init__(self, console: Console, timing: Option = "minmax") -> None:
        """
        Args:
            timing: of which ranks the times of phases are.
        """
        self._console, self._timing = console, timing
        self._at = self._of = 0
        self._loss, self._seconds, self._tokens = Smooth(), Smooth(), Smooth()
        self._rate = 0.0
        self._gradient_norm: float | None = None
        self._now: Progress | None = None
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=4)

    def see(self, event: Event) -> None:
        match event:
            case Began():
                self._at, self._of = event.iteration, event.iterations
                self._say(headline(event))
                if self._console.is_terminal:
                    self._live.start(refresh=True)
                    self._console.show_cursor()  # who is killed cannot bring it back
            case Stepped():
                self._at, self._rate = event.iteration, event.rate
                self._gradient_norm = event.gradient_norm
                self._seconds.add(event.seconds)
                self._tokens.add(event.tokens)
                if event.loss is not None:
                    self._loss.add(event.loss)
            case Progress():
                self._now = event
                self._say(line(event, self._console.width if self._console.is_terminal else None))
                if self._console.is_terminal:
                    self._live.refresh()  # a printed line repeats the moving one as it was
                for text in phases(event, self._timing):
                    self._say(text)
            case Validated():
                at = f"{event.of} at iteration {event.iteration}"
                self._say(f"{at} | loss {event.loss:.4f} | perplexity {event.perplexity:.2f}")
            case Said():
                self._say(event.text)

    def close(self) -> None:
        """Leave the last line where it stands."""
        self._live.stop()

    def _line(self) -> Text:
        """As many of the numbers as have room, and a bar if there is any left."""
        width = self._console.width
        text = fitted(f"{self._at}/{self._of}", self._numbers(), width)
        if (room := width - len(text) - 1) >= _BAR:
            full = room * self._at // max(1, self._of)
            return Text.assemble(text + " ", ("━" * full, "green"), ("━" * (room - full), "bright_black"))
        return Text(text, no_wrap=True)

    def _numbers(self) -> list[tuple[int, str]]:
        """In the order they stand in, each with how soon it is left out where there is no room."""
        each, now = self._seconds.mean, self._now
        if each is None or self._tokens.mean is None:
            return []
        return [
            *([(0, f"loss {self._loss.mean:.4f}")] if self._loss.mean is not None else []),
            *([(1, f"grad norm {self._gradient_norm:.2f}")] if self._gradient_norm is not None else []),
            (5, f"lr {self._rate:.1e}"),
            (2, f"{_short(self._tokens.mean / each)} tok/s"),
            *([(4, flops(now.tflops))] if now else []),
            *([(3, f"{now.mfu:.0%} MFU")] if now and now.mfu is not None else []),
            *([(6, f"{_short(in_use(now.memory))}B")] if now else []),
            (0, _clock((self._of - self._at) * each)),
        ]

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Smooth:
    """A mean that forgets: of n steps ago a 0.9 to the n-th part counts.

    Attributes:
        mean: None until there is something to take it of.
    """

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self.mean: float | None = None

    def add(self, value: float) -> None:
        self._sum, self._weight = 0.9 * self._sum + value, 0.9 * self._weight + 1
        self.mean = self._sum / self._weight


def headline(event: Began) -> str:
    """What is trained, how it is cut, where it begins."""
    weights = f"from the weights of {event.loaded}" if event.loaded else "from new weights"
    begins = f"from iteration {event.iteration}" if event.iteration else weights
    size = f"{event.family}, {event.parameters:,} parameters"
    shown = {axis: size for axis, size in event.layout.items() if size > 1 or axis in ("tp", "pp", "dp")}
    cut = " x ".join(f"{axis} {size}" for axis, size in shown.items())
    step = f"{event.global_batch_size} samples x {event.seq_length} tokens a step"
    return f"{size} | {cut} | {step} | {begins}"


def line(now: Progress, width: int | None = None) -> str:
    """A line of the log.

    Args:
        width: columns. Where they are too few, memory, FLOP/s and the time left are left out, then the
            tokens per second; loss, learning rate, gradient norm and what a flag asks for never are.
    """
    first = [
        f"iteration {now.iteration}/{now.iterations}",
        _loss(now),
        f"lr {now.rate:.2e}",
        *([f"grad norm {now.gradient_norm:.2f}"] if now.gradient_norm is not None else []),
        *([f"loss scale {now.loss_scale:g}"] if now.loss_scale != 1 else []),
        *(f"{name.replace('-', ' ')} {_digits(value)}" for name, value in now.extra.items()),
    ]
    rest = [
        (0, f"{now.tokens_per_second:,.0f} tokens/s"),
        (3, f"{flops(now.tflops)} a rank"),
        *([(2, f"MFU {now.mfu:.1%}")] if now.mfu is not None else []),
        (4, f"{in_use(now.memory) / 1e9:.2f} GB"),
        (1, f"{_clock(now.seconds_left)} left"),
    ]
    while width is not None and rest and len(" | ".join([*first, *(text for _, text in rest)])) > width:
        rest.remove(max(rest))
    return " | ".join([*first, *(text for _, text in rest)])


def fitted(first: str, parts: Sequence[tuple[int, str]], width: int) -> str:
    """The parts in one line of at most `width`: those with the largest number are left out first."""
    parts = list(parts)
    while parts and len(" ".join([first, *(text for _, text in parts)])) > width:
        parts.remove(max(parts, key=lambda part: part[0]))
    return " ".join([first, *(text for _, text in parts)])[:width]


def phases(now: Progress, option: Option) -> Iterator[str]:
    """What --timing-log-level asks for, a phase a line below a heading."""
    if now.timers_of_ranks:
        whose = {"max": "slowest rank", "minmax": "fastest and slowest rank", "all": "every rank"}[option]
        yield f"  milliseconds of a step, {whose}:"
    for name, seconds in now.timers_of_ranks.items():
        each = " ".join(f"{1000 * value:.2f}" for value in seconds)
        most = max(range(len(seconds)), key=seconds.__getitem__)
        slowest = f" | most on rank {most}" if option == "all" and len(seconds) > 1 else ""
        yield f"  {name:.<40} {each}{slowest}"


def _loss(now: Progress) -> str:
    loss = "no update" if now.loss is None else f"loss {now.loss:.4f}"
    return f"{loss} ({now.skipped} skipped)" if now.skipped else loss


def flops(tera: float) -> str:
    """In the unit that leaves some digits: a laptop has GFLOP/s."""
    unit, size = next((u for u in (("T", 1.0), ("G", 1e-3)) if tera >= 0.1 * u[1]), ("M", 1e-6))
    return f"{tera / size:.3g} {unit}FLOP/s"


def _digits(value: float) -> str:
    """A count in full, any other number in six digits."""
    return f"{value:,.0f}" if value.is_integer() and value < 1e15 else f"{value:.6g}"


def _short(number: float) -> str:
    """Three digits and a letter."""
    power = 0
    while number >= 999.5:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{('', 'k', 'M', 'G', 'T', 'P')[power]}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
