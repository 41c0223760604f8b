"""What the commands share: option types, and a line of progress."""

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
    help="Ranks that share every layer.",
)
PP = click.option(
    "--pp",
    "--pipeline-model-parallel-size",
    "--target-pipeline-parallel-size",
    "pp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Stages of the pipeline.",
)
VP = click.option(
    "--vp",
    "--num-virtual-stages-per-pipeline-rank",
    "vp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Stages of each pipeline rank.",
)
TRUE_VOCAB = click.option(
    "--true-vocab-size", type=DEGREE, help="Ids of the tokenizer, where what is read has padded rows."
)
MODEL_NAME = click.option(
    "--model", help="A named model, or a JSON file with its fields, where what is read does not say."
)
SHARD = click.option(
    "--max-shard-size",
    "shard",
    default="5GB",
    show_default=True,
    callback=lambda context, option, text: size(text),
    help="Of one file, where a format has several: KB, MB or GB of 1000s.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="A JSON object instead of text.")
FORCE = click.option("--force", "--overwrite", "force", is_flag=True, help="Replace what --save holds.")

_WIDTH = 24  # characters of the bar
_TURN = 0.1  # seconds between two looks of a person


def size(text: str) -> int:
    """Bytes, of a number with a unit.

    Raises:
        ConfigError: it is not one.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)B", text.upper())
    number = int(found[1]) * 1000 ** " KMG".index(found[2] or " ") if found else 0
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
    """Progress of so many bytes: a bar and their rate on stderr where that is a terminal, else nothing.

    Args:
        what: is being done.
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
    """One line, written again and again; called with the bytes done since its last call."""

    def __init__(self, what: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.now, self.done = what, total, now, 0
        self.began = self.told = now()

    def __call__(self, size: int) -> None:
        self.done += size
        now = self.now()
        if now - self.told < _TURN:
            return
        self.told = now
        part, rate = self.done / max(self.total, 1), self.done / (now - self.began)
        bar = "#" * int(_WIDTH * part)
        left = (self.total - self.done) / rate if rate else 0.0
        click.echo(
            f"\r\x1b[K{self.what} [{bar:<{_WIDTH}}] {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, "
            f"{rate / 1e6:,.0f} MB/s, {left:.0f} s left",
            err=True,
            nl=False,
        )
