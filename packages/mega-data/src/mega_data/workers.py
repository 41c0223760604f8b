"""One function on several processes, results in the order of the items."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from mega_schema.errors import MegaError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(work, items)`, on `workers` processes when that is more than one.

    `work` is sent to each process once, so it may hold what is costly to make. Each process holds one item
    at a time, so memory does not grow with the items. The processes end with the iterator, whoever ends it.

    Args:
        work: picklable; returns what is wrong with an item, and does not raise it.

    Raises:
        MegaError: a process died, as when memory runs out.
    """
    if workers == 1:
        yield from map(work, items)
        return
    # spawn: a fork of a process whose tokenizer has threads can hang
    context, queue = get_context("spawn"), iter(items)
    with ExitStack() as stack:
        pipes: list[Connection] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            pipes.append(ours)
        try:
            busy: deque[Connection] = deque()
            for pipe, item in zip(pipes, islice(queue, workers), strict=False):
                pipe.send(item)
                busy.append(pipe)
            while busy:  # the process that was first to get an item is the first we ask for its result
                pipe = busy.popleft()
                result: Result = pipe.recv()
                for item in islice(queue, 1):
                    pipe.send(item)
                    busy.append(pipe)
                yield result
        except (EOFError, BrokenPipeError, ConnectionResetError):
            hint = "fewer workers need less memory"
            raise MegaError("--workers", "a worker process died", found=workers, hint=hint) from None


def _serve(work: Callable[[Item], Result], pipe: Connection) -> None:
    """A worker: results for items, until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us; it ends us
    # else each of us starts a thread per core
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send(work(item))
