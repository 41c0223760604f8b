"""Run one function on several processes, with results in the order of the items.

The pool starts one process, the seed (a fork server). It builds the work once and forks into the workers,
which share its memory. The seed has no threads, so forking is safe; the caller's process may have threads of
its libraries. Results come through a pipe; their arrays come through shared memory.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self, TypeVar

from mega_data.seed import ITEMS_AHEAD, SHELF_BYTES, Failure, Question, receive_result
from mega_schema.errors import MegaError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Run `map(work, items)`, on `workers` processes if there are several.

    `work` is sent once, so it may be expensive to build. Each process has ITEMS_AHEAD items at a time, so
    memory does not grow with the items. The processes end with the iterator.

    The arrays in a result are valid until the next result is requested.

    Args:
        work: picklable; returns the error of an item instead of raising it.

    Raises:
        MegaError: a process died, for example without memory.
    """
    with ProcessPool(workers) as pool:
        yield from pool.map_in_order(work, items)


class ProcessPool:
    """Processes for `map_in_order` that start before the work is known.

    Args:
        workers: number of processes; 1 is this process.
        modules: modules that the seed imports before it receives the work.
    """

    def __init__(self, workers: int, modules: Sequence[str] = ()) -> None:
        self._workers: list[tuple[Connection, mmap.mmap]] = []
        self._pids: list[int] = []
        self._prepared: object = None
        self._stack = ExitStack()
        if workers < 2:
            return
        self._orders, orders = Pipe()
        worker_ends = list[tuple[int, int]]()
        with ExitStack() as worker_side:
            worker_side.callback(orders.close)
            for _ in range(workers):
                pipe, worker_pipe = Pipe()
                worker_side.callback(worker_pipe.close)
                file = _open_memory(ITEMS_AHEAD * SHELF_BYTES)
                worker_side.callback(os.close, file)
                self._workers.append((pipe, mmap.mmap(file, ITEMS_AHEAD * SHELF_BYTES)))
                worker_ends.append((file, worker_pipe.fileno()))
            self._process = _start_seed(orders.fileno(), worker_ends, modules)
        self._stack.callback(self._process.wait)
        self._stack.callback(self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, work: object) -> None:
        """Send the likely work early, so that it is built in advance. `map_in_order` reports its errors."""
        if self._workers and work != self._prepared:
            self._prepared = work
            with suppress(BrokenPipeError, ConnectionResetError):
                self._orders.send(work)

    def ask(self, work: Item, question: Callable[[Item], Result]) -> Result:
        """Return `question(work)`, computed in the seed process; call it before `map_in_order`.

        Args:
            question: picklable. Its changes to the work are lost in another process.
        """
        if not self._workers:
            return question(work)
        self.prepare(work)
        with self._report_dead_worker():
            self._orders.send(Question(question))
            answer: Any = self._orders.recv()
        if isinstance(answer, Failure):
            raise answer.error
        result: Result = answer
        return result

    def map_in_order(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Run `map(work, items)` on the processes; once per pool."""
        if not self._workers:
            yield from map(work, items)
            return
        queue = iter(items)
        with self._report_dead_worker():
            self.prepare(work)
            self._orders.send(None)
            answer = self._orders.recv()
            if isinstance(answer, Exception):
                raise answer
            self._pids = answer
            busy: deque[int] = deque()
            for number, item in zip(ITEMS_AHEAD * [*range(len(self._workers))], queue, strict=False):
                self._workers[number][0].send(item)
                busy.append(number)
            counts = [0] * len(self._workers)
            while busy:  # results are read in the order in which items were sent
                number = busy.popleft()
                pipe, memory = self._workers[number]
                shelf = memoryview(memory)[counts[number] % ITEMS_AHEAD * SHELF_BYTES :][:SHELF_BYTES]
                counts[number] += 1
                result = receive_result(pipe, shelf)
                if isinstance(result, Failure):
                    raise result.error
                yield result
                for item in islice(queue, 1):  # only now: the worker will reuse the shelf
                    pipe.send(item)
                    busy.append(number)
            self._stop()  # at once: the processes exit while the caller finishes

    @contextmanager
    def _report_dead_worker(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            hint = "run it again; if the system was out of memory, use fewer workers"
            found = f"one of {len(self._workers)}, killed"
            raise MegaError("--workers", "a worker process died", found=found, hint=hint) from None

    def _stop(self) -> None:
        """Terminate the workers. The seed has not waited for them yet, so their pids are still theirs.

        Runs once: after the pipes are closed the seed waits for the workers, and their pids may be reused.
        """
        if self._orders.closed:
            return
        if not self._pids:
            self._process.terminate()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pipe in (self._orders, *(pipe for pipe, _ in self._workers)):
            pipe.close()


def _start_seed(
    orders: int, worker_ends: list[tuple[int, int]], modules: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the process that runs `mega_data.seed` with these pipes and files."""
    lines = (
        # the caller handles Ctrl-C and ends the seed
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        f"sys.path[:] = {sys.path!r}",
        f"from mega_data.seed import main; main({orders}, {worker_ends!r}, {tuple(modules)!r})",
    )
    inherited = (orders, *(file for pair in worker_ends for file in pair))
    # -P: do not import modules from the current folder
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "\n".join(lines)], stdin=subprocess.DEVNULL, pass_fds=inherited
    )


def _open_memory(size: int) -> int:
    """Return the descriptor of an anonymous file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("mega-data")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
