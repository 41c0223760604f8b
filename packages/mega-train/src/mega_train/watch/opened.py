"""The observers that a run asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from mega_model.mesh import World
from mega_train.config import Run
from mega_train.metrics import Record
from mega_train.screen import Screen
from mega_train.watch.observers import Behind, Observer, Observers
from mega_train.watch.tensorboard import TensorBoard


@contextmanager
def opened(run: Run, world: World, out: TextIO) -> Iterator[Observers]:
    """Those of this process: the first rank's, which are told of the whole run.

    Raises:
        ConfigError: one of them cannot be had; the line says what to install or to change.
    """
    found: list[Observer] = []
    watch = Observers(found)
    if world.rank == 0:
        watch = Observers([*_near(run, out), *(Behind(far) for far in _far(run))])
    try:
        yield watch
    finally:
        watch.close()


def _near(run: Run, out: TextIO) -> Iterator[Observer]:
    """Told while the run waits."""
    if run.checkpoint.save is not None:
        yield Record(run.checkpoint.save)
    yield Screen(Console(file=out))


def _far(run: Run) -> Iterator[Observer]:
    """Told by a thread of their own."""
    if run.log.tensorboard_dir is not None:
        yield TensorBoard(run.log)
