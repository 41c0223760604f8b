"""The observers that a run asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from mega_model.distributed.mesh import World
from mega_schema.errors import ConfigError
from mega_train.config import Run
from mega_train.telemetry.codecarbon import CodeCarbon
from mega_train.telemetry.console import Paper, Screen
from mega_train.telemetry.event_log import Record
from mega_train.telemetry.events import Said
from mega_train.telemetry.observers import Behind, Observer, Observers
from mega_train.telemetry.opentelemetry import OpenTelemetry
from mega_train.telemetry.prometheus import Prometheus
from mega_train.telemetry.tensorboard import TensorBoard
from mega_train.telemetry.wandb import WeightsAndBiases


@contextmanager
def opened(run: Run, world: World, out: TextIO) -> Iterator[Observers]:
    """Those of this process: of the first rank all, of the first on another machine what measures energy.

    Raises:
        ConfigError: one of them cannot be had; the line says what to install or to change.
    """
    with ExitStack() as opening:
        far, said = [], []
        for observer in _far(run, world):
            if isinstance(observer, Prometheus):
                said.append(f"metrics at {observer.address}")
            far.append(Behind(observer))
            opening.callback(far[-1].close)  # where the next cannot be had
        near = _near(run, out) if world.rank == 0 else ()
        watch = Observers([*near, *far])
        for text in said:
            watch.see(Said(text))
        opening.pop_all()
    try:
        yield watch
    finally:
        watch.close()


def _near(run: Run, out: TextIO) -> Iterator[Observer]:
    """Told while the run waits."""
    if run.checkpoint.save is not None:
        yield Record(run.checkpoint.save)
    yield Screen(Paper(file=out), run.log.timing_option)


def _far(run: Run, world: World) -> Iterator[Observer]:
    """Told by a thread of their own."""
    log = run.log
    for flag, folder in (
        ("--codecarbon-dir", log.codecarbon_dir),
        ("--tensorboard-dir", log.tensorboard_dir),
    ):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(flag, "not a folder", found=folder, wanted="a folder, or a name that is free")
    if log.codecarbon_dir is not None and world.local_rank == 0:
        yield CodeCarbon(log, world.rank)
    if world.rank:
        return
    if log.prometheus_port is not None:
        yield Prometheus(log)
    if log.tensorboard_dir is not None:
        yield TensorBoard(log)
    if log.wandb_project is not None:
        yield WeightsAndBiases(run)
    if log.opentelemetry_endpoint is not None:
        yield OpenTelemetry.to(log)
