"""One function on several processes, results in the order of the items.

We start one process, a seed. It imports and makes what the work needs, once, and forks into the workers,
which share it. Nothing has run in the seed before, so forking it is safe; to fork the process of a caller is
not, as its libraries may have threads. A worker's results come through a pipe, but for the arrays in them,
which lie in memory that it shares with us.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

from mega_data.worker_errors import portable_error
from mega_schema.errors import MegaError

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD: Final = 2  # items a worker has: one it works on, one that waits for it
SHELF: Final = 4 << 20  # bytes for the arrays of one result; those of a larger one go through the pipe
ALIGNED: Final = 64  # bytes at whose multiples arrays begin


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(work, items)`, on `workers` processes when that is more than one.

    `work` is sent once, so it may hold what is costly to make. Each process holds AHEAD items at a time, so
    memory does not grow with the items. The processes end with the iterator, whoever ends it.

    The arrays in a result are the caller's until it asks for the next result.

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
        self._ours: list[tuple[Connection, mmap.mmap]] = []
        self._pids: list[int] = []
        self._prepared: object = None
        self._stack = ExitStack()
        if workers < 2:
            return
        context = get_context("spawn")
        self._orders, orders = context.Pipe()
        theirs, given = list[Connection](), list[Any]()
        with ExitStack() as files:
            for _ in range(workers):
                pipe, other = context.Pipe()
                file = _memory(AHEAD * SHELF)
                files.callback(os.close, file)
                self._ours.append((pipe, mmap.mmap(file, AHEAD * SHELF)))
                theirs.append(other)
                given.append((file, other))
            process = context.Process(target=_seed, args=(tuple(modules), orders, _Given(given)), daemon=True)
            process.start()
        for pipe in (orders, *theirs):
            pipe.close()
        self._stack.callback(process.join)
        self._stack.callback(self._end, process.terminate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, work: object) -> None:
        """Have what may become the work made ready. What goes wrong there is for `in_order` to find."""
        if self._ours:
            self._prepared = work
            with suppress(BrokenPipeError, ConnectionResetError):
                self._orders.send(work)

    def in_order(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """As the function of that name; once."""
        if not self._ours:
            yield from map(work, items)
            return
        queue = iter(items)
        try:
            if work != self._prepared:
                self._orders.send(work)
            self._orders.send(None)
            answer = self._orders.recv()
            if isinstance(answer, Exception):
                raise answer
            self._pids = answer
            busy: deque[int] = deque()
            for number, item in zip(AHEAD * [*range(len(self._ours))], queue, strict=False):
                self._ours[number][0].send(item)
                busy.append(number)
            counts = [0] * len(self._ours)
            while busy:  # the process that was first to get an item is the first we ask for its result
                number = busy.popleft()
                pipe, memory = self._ours[number]
                shelf = memoryview(memory)[counts[number] % AHEAD * SHELF :][:SHELF]
                counts[number] += 1
                result = _taken(pipe, shelf)
                if isinstance(result, _Failure):
                    raise result.error
                yield result
                for item in islice(queue, 1):  # only now: the worker will want the shelf again
                    pipe.send(item)
                    busy.append(number)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            hint = "run it again; where the system had no memory left, fewer workers need less"
            found = f"one of {len(self._ours)}, ended from outside"
            raise MegaError("--workers", "a worker process died", found=found, hint=hint) from None

    def _end(self, terminate: Callable[[], None]) -> None:
        """End the workers, which the seed has not waited for yet, so that their numbers are still theirs."""
        if not self._pids:
            terminate()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pipe in (self._orders, *(pipe for pipe, _ in self._ours)):
            pipe.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    """In place of a result: what a worker raised."""

    error: Exception


class _Given:
    """For the seed: of each worker, the number of the file it shares with us, and its end of the pipe."""

    def __init__(self, given: list[tuple[int, Connection]]) -> None:
        self.given = given

    def __reduce__(self) -> tuple[object, ...]:
        return _received, ([(DupFd(file), pipe) for file, pipe in self.given],)


def _received(given: list[tuple[Any, Connection]]) -> list[tuple[int, Connection]]:
    return [(file.detach(), pipe) for file, pipe in given]


def _memory(size: int) -> int:
    """The number of an open file without a name, nowhere but in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("mega-data")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    os.ftruncate(file, size)
    return file


def _seed(modules: tuple[str, ...], orders: Connection, given: list[tuple[int, Connection]]) -> None:
    """Make the work, then a worker of it for each pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us; it ends us
    # else each of the workers starts a thread per core
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for module in modules:
        import_module(module)
    with suppress(EOFError, BrokenPipeError):  # who started us is gone
        try:
            work = _last_sent(orders)
        except EOFError:
            raise
        except Exception as error:
            orders.send(portable_error(error))
            os._exit(1)
        pids = [pid for number in range(len(given)) if (pid := _forked(work, number, orders, given))]
        for _, pipe in given:
            pipe.close()
        with suppress(EOFError):
            orders.send(pids)
            orders.recv()  # until its other end is closed
        for pid in pids:
            os.waitpid(pid, 0)
    sys.stderr.flush()
    os._exit(0)  # at once: to take down what was imported would keep waiting who waits for our end


def _last_sent(orders: Connection) -> Any:
    """What comes last before None. What could not be made before it does not matter."""
    work, failed = None, None
    while True:
        sent = orders.recv_bytes()
        try:
            made = pickle.loads(sent)
        except Exception as error:
            failed = error
            continue
        if made is None:
            break
        work, failed = made, None
    if failed is not None:
        raise failed
    return work


def _forked(work: Any, number: int, orders: Connection, given: list[tuple[int, Connection]]) -> int:
    """The number of a new process that serves a pipe; it does not return."""
    pid = os.fork()
    if pid:
        return pid
    try:
        orders.close()
        for other, (_, pipe) in enumerate(given):
            if other != number:  # else its end would not be seen while we live
                pipe.close()
        file, pipe = given[number]
        _serve(work, pipe, mmap.mmap(file, AHEAD * SHELF))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(0)


def _serve(work: Callable[[Any], Any], pipe: Connection, memory: mmap.mmap) -> None:
    """A worker: results for items, until the other end of the pipe is gone."""
    queue: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def receive() -> None:
        # a thread, so that who sends us an item never waits while we wait for him to take a large result
        with suppress(EOFError, ConnectionResetError):
            while True:
                queue.put((pipe.recv(),))
        queue.put(())

    threading.Thread(target=receive, daemon=True).start()
    count = 0
    with suppress(BrokenPipeError, ConnectionResetError):
        while item := queue.get():
            try:
                result = work(*item)
            except Exception as error:  # for the process that started us to raise
                result = _Failure(portable_error(error))
            _give(pipe, memoryview(memory)[count % AHEAD * SHELF :][:SHELF], result)
            count += 1


def _give(pipe: Connection, shelf: memoryview, result: object) -> None:
    """Send a result, its arrays by way of the shelf if they have room there."""
    arrays = list[memoryview]()
    head = pickle.dumps(result, 5, buffer_callback=lambda array: arrays.append(array.raw()))
    sizes = [array.nbytes for array in arrays]
    if _places(sizes)[-1] > len(shelf):
        pipe.send((pickle.dumps(result, 5), None))
        return
    for array, place in zip(arrays, _places(sizes), strict=False):
        shelf[place : place + array.nbytes] = array
    pipe.send((head, sizes))


def _taken(pipe: Connection, shelf: memoryview) -> Any:
    """The result that `_give` sent."""
    head, sizes = pipe.recv()
    if sizes is None:
        return pickle.loads(head)
    arrays = [shelf[place : place + size] for place, size in zip(_places(sizes), sizes, strict=False)]
    return pickle.loads(head, buffers=arrays)


def _places(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these sizes begin, and where the one after them would."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // ALIGNED) * ALIGNED)
    return places
