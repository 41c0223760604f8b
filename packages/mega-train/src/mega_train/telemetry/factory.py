"""Open the observers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from mega_model.distributed.mesh import World
from mega_schema.errors import ConfigError
from mega_train.config import RunConfig
from mega_train.telemetry.codecarbon import CodeCarbon
from mega_train.telemetry.console import ConsoleReporter, PipeSafeConsole
from mega_train.telemetry.evaluations import EvaluationRunner
from mega_train.telemetry.event_log import EventLog
from mega_train.telemetry.events import Message
from mega_train.telemetry.observers import AsyncObserver, Observer, Observers
from mega_train.telemetry.opentelemetry import OpenTelemetry
from mega_train.telemetry.prometheus import Prometheus
from mega_train.telemetry.tensorboard import TensorBoard
from mega_train.telemetry.wandb import WeightsAndBiases


@contextmanager
def open_observers(run: RunConfig, world: World, out: TextIO) -> Iterator[Observers]:
    """Open the observers of this process.

    Rank 0 has all of them, local rank 0 of other hosts only CodeCarbon.

    Raises:
        ConfigError: an observer is not available; the message has a hint.
    """
    with ExitStack() as stack:
        asynchronous, messages = [], []
        for observer in _async_observers(run, world):
            if isinstance(observer, Prometheus):
                messages.append(f"metrics at {observer.address}")
            asynchronous.append(AsyncObserver(observer))
            stack.callback(asynchronous[-1].close)  # if a later one cannot be opened
        synchronous = _sync_observers(run, out) if world.rank == 0 else ()
        observers = Observers([*synchronous, *asynchronous])
        if run.evaluation.commands and world.rank == 0:
            observers.add(EvaluationRunner(run, observers.on_event))
        for text in messages:
            observers.on_event(Message(text))
        stack.pop_all()
    try:
        yield observers
    finally:
        observers.close()


def _sync_observers(run: RunConfig, out: TextIO) -> Iterator[Observer]:
    """Yield the observers that run in the training thread."""
    if run.checkpoint.save is not None:
        yield EventLog(run.checkpoint.save)
    yield ConsoleReporter(PipeSafeConsole(file=out), run.log.timing_option)


def _async_observers(run: RunConfig, world: World) -> Iterator[Observer]:
    """Yield the observers that run in their own threads."""
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
        yield OpenTelemetry.from_config(log)
