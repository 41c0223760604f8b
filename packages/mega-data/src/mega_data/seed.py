"""The seed of `mega_data.process_pool`: the process that makes the work once and forks into those that do it.

It is a program of its own, not a process of `multiprocessing`, which would import the caller's main module
here and start a second process that looks after the first.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final

from mega_data.worker_errors import portable_error

ITEMS_AHEAD: Final = 2  # items a worker has: one it works on, one that waits for it
SHELF_BYTES: Final = 4 << 20  # bytes for the arrays of one result; those of a larger one go through the pipe
ALIGNMENT: Final = 64  # bytes at whose multiples arrays begin


@dataclass(frozen=True, slots=True)
class Failure:
    """In place of a result: what a worker raised."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Question:
    """In place of work: what to tell of the work that was sent last."""

    ask: Callable[[Any], Any]


def main(orders: int, worker_ends: Sequence[tuple[int, int]], modules: Sequence[str]) -> None:
    """Make the work, then a worker of it for each pipe.

    Args:
        orders: number of the pipe that brings works and questions.
        given: of each worker, the number of the file it shares with who started us, and that of its pipe.
        modules: what to import before the work comes.
    """
    # else each of the workers starts a thread per core
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for module in modules:
        with suppress(ImportError):  # not installed: the work says so where it needs it
            import_module(module)
    with suppress(EOFError, BrokenPipeError):  # who started us is gone
        _fork_workers(Connection(orders), [(file, Connection(pipe)) for file, pipe in worker_ends])
    sys.stderr.flush()
    os._exit(0)  # at once: to take down what was imported would keep waiting who waits for our end


def _fork_workers(orders: Connection, worker_ends: list[tuple[int, Connection]]) -> None:
    try:
        work = _receive_work(orders)
    except EOFError:
        raise
    except Exception as error:
        orders.send(portable_error(error))
        os._exit(1)
    pids = [
        pid for number in range(len(worker_ends)) if (pid := _fork_worker(work, number, orders, worker_ends))
    ]
    for _, pipe in worker_ends:
        pipe.close()
    with suppress(EOFError):
        orders.send(pids)
        orders.recv()  # until its other end is closed
    for pid in pids:
        os.waitpid(pid, 0)


def _receive_work(orders: Connection) -> Any:
    """What comes last before None. What could not be made before it does not matter."""
    work, error_of_work = None, None
    while True:
        data = orders.recv_bytes()
        try:
            message = pickle.loads(data)
        except Exception as error:
            error_of_work = error
            continue
        if isinstance(message, Question):
            _answer_question(orders, message, work, error_of_work)
            continue
        if message is None:
            break
        work, error_of_work = message, None
    if error_of_work is not None:
        raise error_of_work
    return work


def _answer_question(
    orders: Connection, question: Question, work: Any, error_of_work: Exception | None
) -> None:
    """Tell in a process of its own: the libraries that answer start threads, and a fork must not have any."""
    if error_of_work is not None:
        orders.send(Failure(portable_error(error_of_work)))
        return
    pid = os.fork()
    if not pid:
        with suppress(BrokenPipeError):
            try:
                answer = question.ask(work)
            except Exception as error:
                answer = Failure(portable_error(error))
            orders.send(answer)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        os._exit(1)  # it died without an answer, which who asked sees by our end


def _fork_worker(
    work: Any, number: int, orders: Connection, worker_ends: list[tuple[int, Connection]]
) -> int:
    """The number of a new process that serves a pipe; it does not return."""
    pid = os.fork()
    if pid:
        return pid
    try:
        orders.close()
        for index, (_, pipe) in enumerate(worker_ends):
            if index != number:  # else its end would not be seen while we live
                pipe.close()
        file, pipe = worker_ends[number]
        _serve(work, pipe, mmap.mmap(file, ITEMS_AHEAD * SHELF_BYTES))
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
                result = Failure(portable_error(error))
            _send_result(pipe, memoryview(memory)[count % ITEMS_AHEAD * SHELF_BYTES :][:SHELF_BYTES], result)
            count += 1


def _send_result(pipe: Connection, shelf: memoryview, result: object) -> None:
    """Send a result, its arrays by way of the shelf if they have room there."""
    arrays = list[memoryview]()
    head = pickle.dumps(result, 5, buffer_callback=lambda array: arrays.append(array.raw()))
    sizes = [array.nbytes for array in arrays]
    if _array_offsets(sizes)[-1] > len(shelf):
        pipe.send((pickle.dumps(result, 5), None))
        return
    for array, place in zip(arrays, _array_offsets(sizes), strict=False):
        shelf[place : place + array.nbytes] = array
    pipe.send((head, sizes))


def receive_result(pipe: Connection, shelf: memoryview) -> Any:
    """The result that `_give` sent."""
    head, sizes = pipe.recv()
    if sizes is None:
        return pickle.loads(head)
    arrays = [shelf[place : place + size] for place, size in zip(_array_offsets(sizes), sizes, strict=False)]
    return pickle.loads(head, buffers=arrays)


def _array_offsets(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these sizes begin, and where the one after them would."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return places
