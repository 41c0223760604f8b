"""Run jobs in threads on all cores: reading, writing, checksums and numpy's copies release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar, cast

_MAX_THREADS = 8  # more threads need memory and do not read faster
_END = object()
Job = TypeVar("Job")
Value = TypeVar("Value")
UpdateProgress = Callable[[int], object]  # called with the bytes done since the last call
Progress = Callable[[int], AbstractContextManager[UpdateProgress]]  # also called with the total bytes


@contextmanager
def no_progress(_: int) -> Iterator[UpdateProgress]:
    """Report no progress."""
    yield lambda _: None


def parallel_map(
    jobs: Sequence[Job], work: Callable[[Job, UpdateProgress], object], update: UpdateProgress
) -> None:
    """Run all jobs in threads, started in order. If one fails, the others stop.

    Args:
        work: does a job; it must often call its second argument with the bytes done, which also stops it
            after a failure.
        update: called with the bytes done, by one thread at a time.

    Raises:
        Exception: the exception of the first job that failed.
    """
    stop = threading.Event()
    lock = threading.Lock()

    def count(size: int) -> None:
        if stop.is_set():
            raise _CancelledError
        with lock:
            update(size)

    threads = min(
        _MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _MAX_THREADS
    )
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, job, count) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    failed = [e for future in futures if not future.cancelled() and (e := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, _CancelledError):
            raise error


def prefetch(values: Iterator[Value]) -> Generator[Value, None, None]:
    """Yield the values of an iterable; a thread computes the next value while the caller uses the last one.

    Raises:
        Exception: raised by the iterable, in place of the value.
    """
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, values, _END)
        try:
            while (value := upcoming.result()) is not _END:
                upcoming = pool.submit(next, values, _END)
                yield cast(Value, value)
        finally:
            upcoming.cancel()


class _CancelledError(Exception):
    """Another job has failed."""
