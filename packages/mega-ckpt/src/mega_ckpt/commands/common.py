"""Options and the progress bar that the commands share."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click

from mega_schema.errors import ConfigError

PATH = click.Path(path_type=Path)
DEGREE = click.IntRange(min=1)
TP = click.option(
    "--tp",
    "--tensor-model-parallel-size",
    "--target-tensor-parallel-size",
    "tp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Tensor-parallel ranks.",
)
PP = click.option(
    "--pp",
    "--pipeline-model-parallel-size",
    "--target-pipeline-parallel-size",
    "pp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Pipeline stages.",
)
VP = click.option(
    "--vp",
    "--num-virtual-stages-per-pipeline-rank",
    "vp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Virtual pipeline stages of each rank.",
)
TRUE_VOCAB = click.option(
    "--true-vocab-size",
    type=DEGREE,
    help="Vocabulary size of the tokenizer, if the source pads its embedding.",
)
MODEL_NAME = click.option(
    "--model",
    help="Model preset, or JSON file with its fields, for a source that does not describe its model.",
)
SHARD = click.option(
    "--max-shard-size",
    "shard",
    default="5GB",
    show_default=True,
    callback=lambda context, option, text: parse_size(text),
    help="Largest size of one weight file: KB, MB or GB, in powers of 1000.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of text.")
FORCE = click.option("--force", "--overwrite", "force", is_flag=True, help="Replace the content of --save.")

_WIDTH = 24  # characters of the bar
_REFRESH_SECONDS = 0.1  # seconds between updates


def parse_size(text: str) -> int:
    """Parse a number of bytes with a unit.

    Raises:
        ConfigError: it is not one.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)B", text.upper())
    number = int(match[1]) * 1000 ** " KMG".index(match[2] or " ") if match else 0
    if not number:
        raise ConfigError(
            "--max-shard-size",
            "not a size",
            found=text,
            wanted="a whole number and KB, MB or GB",
            hint="--max-shard-size 5GB",
        )
    return number


def progress(what: str) -> Callable[[int], AbstractContextManager[Callable[[int], object]]]:
    """Return a progress factory: a bar with the byte rate if stderr is a terminal, else nothing.

    Args:
        what: the work, for the start of the line.
    """

    @contextmanager
    def shown(total: int) -> Iterator[Callable[[int], object]]:
        if not sys.stderr.isatty():
            yield lambda _: None
            return
        try:
            yield Bar(what, total)
        finally:
            click.echo("\r\x1b[K", err=True, nl=False)

    return shown


class Bar:
    """A progress bar on one line; called with the bytes done since its last call."""

    def __init__(self, what: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self.what = what
        self.total = total
        self.now = now
        self.done = 0
        self.started = self.last_shown = now()

    def __call__(self, size: int) -> None:
        self.done += size
        now = self.now()
        if now - self.last_shown < _REFRESH_SECONDS:
            return
        self.last_shown = now
        part, rate = self.done / max(self.total, 1), self.done / (now - self.started)
        bar = "#" * int(_WIDTH * part)
        seconds_left = (self.total - self.done) / rate if rate else 0.0
        click.echo(
            f"\r\x1b[K{self.what} [{bar:<{_WIDTH}}] {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, "
            f"{rate / 1e6:,.0f} MB/s, {seconds_left:.0f} s left",
            err=True,
            nl=False,
        )
