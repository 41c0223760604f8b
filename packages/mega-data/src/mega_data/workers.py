"""One function on several processes, results in the order of the items."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Self, TypeVar

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
    with Started(workers) as started:
        yield from started.in_order(work, items)


class Started:
    """Processes for `in_order` that start before the work is known, so that both begin at the same time.

    Args:
        workers: how many; 1 is this process.
        modules: what they import meanwhile.
    """

    def __init__(self, workers: int, modules: Sequence[str] = ()) -> None:
        self._pipes: list[Connection] = []
        self._stack = ExitStack()
        # spawn: a fork of a process whose tokenizer has threads can hang
        context = get_context("spawn")
        for _ in range(workers if workers > 1 else 0):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(tuple(modules), theirs), daemon=True)
            process.start()
            theirs.close()
            self._stack.callback(process.join)
            self._stack.callback(process.terminate)
            self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def in_order(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """As the function of that name; once."""
        if not self._pipes:
            yield from map(work, items)
            return
        queue = iter(items)
        try:
            for pipe in self._pipes:
                pipe.send(work)
            busy: deque[Connection] = deque()
            for pipe, item in zip(self._pipes, islice(queue, len(self._pipes)), strict=False):
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
            hint, found = "fewer workers need less memory", len(self._pipes)
            raise MegaError("--workers", "a worker process died", found=found, hint=hint) from None


def _serve(modules: tuple[str, ...], pipe: Connection) -> None:
    """A worker: results for items, until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us; it ends us
    # else each of us starts a thread per core
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for module in modules:
        import_module(module)
    try:
        work = pipe.recv()
        while True:
            pipe.send(work(pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # who started us is gone
