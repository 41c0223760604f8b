"""Observers of a run, and that none of them can stop it.

To add an observer: a file with a class that has `see` and `close`, and a line in `telemetry.factory`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from mega_train.telemetry.events import Event

ROOM = 4096  # events that wait for a slow observer
PATIENCE = 10.0  # seconds that the end of a run waits for it

log = logging.getLogger("mega.train")


class Observer(Protocol):
    """Who is told what happens to a run."""

    def see(self, event: Event) -> None:
        """Called in order, by one thread."""

    def close(self) -> None:
        """The run has ended, however it did."""


class Observers:
    """Several of them as one. One that fails is told nothing more; the run goes on and says so once."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def see(self, event: Event) -> None:
        for observer in list(self._observers):
            try:
                observer.see(event)
            except Exception as error:
                self._observers.remove(observer)
                _gave_up(observer, error)

    def close(self) -> None:
        for observer in reversed(self._observers):
            try:
                observer.close()
            except Exception as error:
                _gave_up(observer, error)


class Behind:
    """An observer that is told by a thread of its own, so that the run never waits for it.

    What it has not seen when `ROOM` events wait for it is lost, and so is what it cannot take in `PATIENCE`
    seconds once the run has ended.
    """

    def __init__(self, observer: Observer, *, room: int = ROOM, patience: float = PATIENCE) -> None:
        self._observer, self._patience = observer, patience
        self._waiting: queue.Queue[Event | None] = queue.Queue(room)
        self._lost = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name=name_of(observer), daemon=True)
        self._thread.start()

    def see(self, event: Event) -> None:
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            if not self._lost:
                log.warning("%s is too slow: events are lost to it", name_of(self._observer))
            self._lost += 1

    def close(self) -> None:
        self._ended.set()
        with suppress(queue.Full):  # it is awake
            self._waiting.put_nowait(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            log.warning("%s did not end in %g s and is left", name_of(self._observer), self._patience)

    def _tell(self) -> None:
        failed = False
        while not (self._ended.is_set() and self._waiting.empty()):
            event = self._waiting.get()
            if event is None or failed:
                continue
            try:
                self._observer.see(event)
            except Exception as error:
                failed = True
                _gave_up(self._observer, error)
        try:
            self._observer.close()
        except Exception as error:
            _gave_up(self._observer, error)


def name_of(observer: Observer) -> str:
    """What a person is told of it by."""
    return type(observer).__name__


def _gave_up(observer: Observer, error: Exception) -> None:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    log.warning("%s failed and is told nothing more (%s); the run goes on", name_of(observer), words)
