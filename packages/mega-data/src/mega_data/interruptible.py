"""Handle Ctrl-C and SIGTERM while a library's compiled code runs, which ignores signals."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

import click

from mega_schema.app.cli_runner import INTERRUPTED, TERMINATED, TerminationError

T = TypeVar("T")
POLL_SECONDS = 0.2  # between two checks for signals


def run_interruptible(work: Callable[[], T]) -> T:
    """Run a function in a thread, and exit the process at once on a signal.

    The function must not rely on its own `finally` to remove files: the thread cannot be stopped, so the
    process exits while it runs.

    Raises:
        BaseException: the exception of the function.
    """
    results = SimpleQueue[tuple[list[T], BaseException | None]]()

    def call() -> None:
        try:
            results.put(([work()], None))
        except BaseException as error:  # raised again in the waiting thread
            results.put(([], error))

    threading.Thread(target=call, daemon=True).start()
    try:
        while True:
            try:
                values, error = results.get(timeout=POLL_SECONDS)
                break
            except Empty:
                continue
    except KeyboardInterrupt as interrupt:
        _exit_now(isinstance(interrupt, TerminationError))
    if error is not None:
        raise error
    return values[0]


def _exit_now(terminated: bool) -> NoReturn:
    click.echo("terminated" if terminated else "\ninterrupted", err=True)
    sys.stderr.flush()
    os._exit(TERMINATED if terminated else INTERRUPTED)
