"""Observers of a run, isolated so that none can stop it.

To add an observer: write a class with `on_event` and `close`, and add a line to `telemetry.factory`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from mega_train.telemetry.events import Event

QUEUE_SIZE = 4096  # events queued for a slow observer
CLOSE_TIMEOUT = 10.0  # seconds that the end of a run waits for an observer

log = logging.getLogger("mega.train")


class Observer(Protocol):
    """A receiver of a run's events."""

    def on_event(self, event: Event) -> None:
        """Handle an event. Called in order, by one thread."""

    def close(self) -> None:
        """Release resources after the run has ended, with or without an error."""


class Observers:
    """A group of observers. An observer that fails is dropped with a warning; the run continues."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Add an observer. It is closed before the earlier ones, which still receive its last events."""
        self._observers.append(observer)

    def on_event(self, event: Event) -> None:
        for observer in list(self._observers):
            try:
                observer.on_event(event)
            except Exception as error:
                self._observers.remove(observer)
                _log_failure(observer, error)

    def close(self) -> None:
        for observer in reversed(self._observers):
            try:
                observer.close()
            except Exception as error:
                _log_failure(observer, error)


class AsyncObserver:
    """Runs an observer in its own thread, so that the run never waits for it.

    Events are dropped while `QUEUE_SIZE` events wait, and after the run has ended for `CLOSE_TIMEOUT`
    seconds.
    """

    def __init__(
        self, observer: Observer, *, queue_size: int = QUEUE_SIZE, close_timeout: float = CLOSE_TIMEOUT
    ) -> None:
        self._observer = observer
        self._close_timeout = close_timeout
        self._queue: queue.Queue[Event | None] = queue.Queue(queue_size)
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name=observer_name(observer), daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            if not self._dropped:
                log.warning("%s is too slow: events are dropped", observer_name(self._observer))
            self._dropped += 1

    def close(self) -> None:
        self._closing.set()
        with suppress(queue.Full):  # a full queue wakes the thread anyway
            self._queue.put_nowait(None)
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            log.warning(
                "%s did not stop within %g s and is abandoned",
                observer_name(self._observer),
                self._close_timeout,
            )

    def _deliver(self) -> None:
        failed = False
        while not (self._closing.is_set() and self._queue.empty()):
            event = self._queue.get()
            if event is None or failed:
                continue
            try:
                self._observer.on_event(event)
            except Exception as error:
                failed = True
                _log_failure(self._observer, error)
        try:
            self._observer.close()
        except Exception as error:
            _log_failure(self._observer, error)


def observer_name(observer: Observer) -> str:
    """Return the observer's name for messages."""
    return type(observer).__name__


def _log_failure(observer: Observer, error: Exception) -> None:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    log.warning("%s failed and is disabled (%s); training continues", observer_name(observer), words)
