"""Many jobs on all cores. Reading, writing, checksums and numpy's copies let other threads run meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar, cast

_MOST = 8  # more of them take memory, and a disk gives no more
_END = object()
Job = TypeVar("Job")
Value = TypeVar("Value")
Told = Callable[[int], object]  # what is called with the bytes done since its last call
Progress = Callable[[int], AbstractContextManager[Told]]  # and with how many there are going to be


@contextmanager
def silent(_: int) -> Iterator[Told]:
    """Progress that nobody looks at."""
    yield lambda _: None


def each(jobs: Sequence[Job], work: Callable[[Job, Told], object], told: Told) -> None:
    """Do every job, some at a time, and begin with the first. One that fails ends the others.

    Args:
        work: does a job, and calls what it is given with the bytes done, often: there the others end.
        told: called by one thread at a time.

    Raises:
        Exception: of the first job that failed.
    """
    stop, one = threading.Event(), threading.Lock()

    def count(size: int) -> None:
        if stop.is_set():
            raise _Stopped
        with one:
            told(size)

    threads = min(_MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _MOST)
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, job, count) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    failed = [e for future in futures if not future.cancelled() and (e := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, _Stopped):
            raise error


def ahead(values: Iterator[Value]) -> Generator[Value, None, None]:
    """The same values; a thread makes the next while its caller is at work with one.

    Raises:
        Exception: that making a value raised, in its place.
    """
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, values, _END)
        try:
            while (value := upcoming.result()) is not _END:
                upcoming = pool.submit(next, values, _END)
                yield cast(Value, value)
        finally:
            upcoming.cancel()


class _Stopped(Exception):
    """Another job has failed."""
