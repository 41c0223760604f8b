"""Console output: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mega_schema.app.progress import format_duration, start_live
from mega_schema.errors import escape_controls
from mega_train.config.logging import TimingOption
from mega_train.telemetry.events import (
    EvaluationEnd,
    Event,
    LogLine,
    Message,
    StepEnd,
    TrainStart,
    ValidationEnd,
)
from mega_train.telemetry.memory_usage import used_bytes

_MIN_BAR = 12  # cells of the shortest useful bar


class PipeSafeConsole(Console):
    """A console that raises when its reader closes the pipe, as `| head` does; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Handle a closed pipe.

        Raises:
            BrokenPipeError: always, for the writer to handle.
        """
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ConsoleReporter:
    """Prints log lines and, on a terminal, a live line below them that changes with every step.

    TFLOP/s and memory in the live line are those of the last log line.
    """

    def __init__(self, console: Console, timing: TimingOption = "minmax") -> None:
        """Report to a console.

        Args:
            timing: which ranks' phase times are shown.
        """
        self._console = console
        self._timing = timing
        self._iteration = self._iterations = 0
        self._loss = Ema()
        self._seconds = Ema()
        self._tokens = Ema()
        self._lr = 0.0
        self._grad_norm: float | None = None
        self._last_log: LogLine | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def on_event(self, event: Event) -> None:
        match event:
            case TrainStart():
                self._iteration = event.iteration
                self._iterations = event.iterations
                self._print(format_start(event))
                if self._console.is_terminal:
                    start_live(self._live)
            case StepEnd():
                self._iteration = event.iteration
                self._lr = event.learning_rate
                self._grad_norm = event.grad_norm
                self._seconds.update(event.seconds)
                self._tokens.update(event.tokens)
                if event.loss is not None:
                    self._loss.update(event.loss)
            case LogLine():
                self._last_log = event
                self._print(format_log(event, self._console.width if self._console.is_terminal else None))
                if self._console.is_terminal:
                    self._live.refresh()  # printing redraws the live line with its old content
                for text in format_timers(event, self._timing):
                    self._print(text)
            case ValidationEnd():
                position = f"{event.split} at iteration {event.iteration}"
                values = {"loss": event.loss, **event.loss_terms, **event.metrics}
                words = [position, *(f"{name} {value:.4f}" for name, value in values.items())]
                if event.perplexity is not None:
                    words.append(f"perplexity {event.perplexity:.2f}")
                self._print(" | ".join(words))
            case EvaluationEnd():
                numbers = (f"{name.replace('_', ' ')} {value:.4f}" for name, value in event.metrics.items())
                self._print(" | ".join((f"{event.task} at iteration {event.iteration}", *numbers)))
            case Message():
                self._print(event.text)

    def close(self) -> None:
        """Stop the live display; its last line stays on the screen."""
        self._live.stop()

    def _render(self) -> Text:
        """Render as many numbers as fit, and a bar in the remaining space."""
        width = self._console.width
        text = fit_width(f"{self._iteration}/{self._iterations}", self._numbers(), width)
        if (bar_cells := width - len(text) - 1) >= _MIN_BAR:
            filled = bar_cells * self._iteration // max(1, self._iterations)
            return Text.assemble(
                text + " ", ("━" * filled, "green"), ("━" * (bar_cells - filled), "bright_black")
            )
        return Text(text, no_wrap=True)

    def _numbers(self) -> list[tuple[int, str]]:
        """List the numbers in their order, each with its priority: the largest is dropped first."""
        iteration_seconds = self._seconds.mean
        log_line = self._last_log
        if iteration_seconds is None or self._tokens.mean is None:
            return []
        return [
            *([(0, f"loss {self._loss.mean:.4f}")] if self._loss.mean is not None else []),
            *([(1, f"grad norm {self._grad_norm:.2f}")] if self._grad_norm is not None else []),
            (5, f"lr {self._lr:.1e}"),
            (2, f"{_format_si(self._tokens.mean / iteration_seconds)} tok/s"),
            *([(4, format_flops(log_line.tflops))] if log_line else []),
            *([(3, f"{log_line.mfu:.0%} MFU")] if log_line and log_line.mfu is not None else []),
            *([(6, f"{_format_si(used_bytes(log_line.memory))}B")] if log_line else []),
            (0, format_duration((self._iterations - self._iteration) * iteration_seconds)),
        ]

    def _print(self, text: str) -> None:
        text = "\n".join(map(escape_controls, text.split("\n")))  # it may name files
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Ema:
    """Exponential moving average with decay 0.9, corrected for the start.

    Attributes:
        mean: None before the first value.
    """

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self.mean: float | None = None

    def update(self, value: float) -> None:
        self._sum, self._weight = 0.9 * self._sum + value, 0.9 * self._weight + 1
        self.mean = self._sum / self._weight


def format_start(event: TrainStart) -> str:
    """Describe the model, its layout and where training starts."""
    weights = f"from the weights of {event.loaded}" if event.loaded else "from new weights"
    start = f"from iteration {event.iteration}" if event.iteration else weights
    model = f"{event.family} ({event.objective})" if event.objective else event.family
    size = f"{model}, {event.parameters:,} parameters"
    shown = {axis: size for axis, size in event.layout.items() if size > 1 or axis in ("tp", "pp", "dp")}
    layout = " x ".join(f"{axis} {size}" for axis, size in shown.items())
    step = f"{event.global_batch_size} samples x {event.seq_length} tokens a step"
    return f"{size} | {layout} | {step} | {start}"


def format_log(log_line: LogLine, width: int | None = None) -> str:
    """Format a log line.

    Args:
        width: columns. Where they are too few, memory, FLOP/s and ETA are dropped, then tokens per second;
            loss, learning rate, gradient norm and requested numbers never are.
    """
    required = [
        f"iteration {log_line.iteration}/{log_line.iterations}",
        _format_loss(log_line),
        *(f"{name} {value:.4f}" for name, value in log_line.loss_terms.items()),
        f"lr {log_line.learning_rate:.2e}",
        *([f"grad norm {log_line.grad_norm:.2f}"] if log_line.grad_norm is not None else []),
        *([f"loss scale {log_line.loss_scale:g}"] if log_line.loss_scale != 1 else []),
        *(f"{name.replace('-', ' ')} {_format_number(value)}" for name, value in log_line.extra.items()),
    ]
    optional = [
        (0, f"{log_line.tokens_per_second:,.0f} tokens/s"),
        (3, f"{format_flops(log_line.tflops)} per rank"),
        *([(2, f"MFU {log_line.mfu:.1%}")] if log_line.mfu is not None else []),
        (4, f"{used_bytes(log_line.memory) / 1e9:.2f} GB"),
        (1, f"{format_duration(log_line.eta_seconds)} left"),
    ]
    while (
        width is not None
        and optional
        and len(" | ".join([*required, *(text for _, text in optional)])) > width
    ):
        optional.remove(max(optional))
    return " | ".join([*required, *(text for _, text in optional)])


def fit_width(first: str, parts: Sequence[tuple[int, str]], width: int) -> str:
    """Join the parts into at most `width` columns; drop parts with the largest numbers first."""
    parts = list(parts)
    while parts and len(" ".join([first, *(text for _, text in parts)])) > width:
        parts.remove(max(parts, key=lambda part: part[0]))
    return " ".join([first, *(text for _, text in parts)])[:width]


def format_timers(log_line: LogLine, option: TimingOption) -> Iterator[str]:
    """Yield the lines of --timing-log-level: a heading, then one line per phase."""
    if log_line.timers_of_ranks:
        ranks = {"max": "slowest rank", "minmax": "fastest and slowest rank", "all": "every rank"}[option]
        yield f"  milliseconds of a step, {ranks}:"
    for name, seconds in log_line.timers_of_ranks.items():
        milliseconds = " ".join(f"{1000 * value:.2f}" for value in seconds)
        slowest_rank = max(range(len(seconds)), key=seconds.__getitem__)
        slowest = f" | most on rank {slowest_rank}" if option == "all" and len(seconds) > 1 else ""
        yield f"  {name:.<40} {milliseconds}{slowest}"


def _format_loss(log_line: LogLine) -> str:
    loss = "no update" if log_line.loss is None else f"loss {log_line.loss:.4f}"
    return f"{loss} ({log_line.skipped} skipped)" if log_line.skipped else loss


def format_flops(tflops: float) -> str:
    """Format TFLOP/s with a suitable unit, such as GFLOP/s on a laptop."""
    unit, size = next((u for u in (("T", 1.0), ("G", 1e-3)) if tflops >= 0.1 * u[1]), ("M", 1e-6))
    return f"{tflops / size:.3g} {unit}FLOP/s"


def _format_number(value: float) -> str:
    """Format a count in full, any other number with six digits."""
    return f"{value:,.0f}" if value.is_integer() and value < 1e15 else f"{value:.6g}"


def _format_si(number: float) -> str:
    """Format a number with three digits and a unit prefix."""
    power = 0
    while number >= 999.5:
        number /= 1000
        power += 1
    return f"{number:.3g}{('', 'k', 'M', 'G', 'T', 'P')[power]}"
