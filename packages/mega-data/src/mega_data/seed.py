"""The seed process of `mega_data.process_pool`: it builds the work once and forks into the workers.

It is a separate program. A `multiprocessing` process would import the caller's main module and start a
resource tracker process.
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

ITEMS_AHEAD: Final = 2  # per worker: one in work, one waiting
SHELF_BYTES: Final = 4 << 20  # of shared memory per result; larger arrays go through the pipe
ALIGNMENT: Final = 64  # of arrays, in bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker, sent in place of a result."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Question:
    """A function to apply to the last work received, sent in place of work."""

    ask: Callable[[Any], Any]


def main(orders: int, worker_ends: Sequence[tuple[int, int]], modules: Sequence[str]) -> None:
    """Build the work, then fork a worker for each pipe.

    Args:
        orders: descriptor of the pipe for works and questions.
        worker_ends: descriptors of each worker's shared memory file and pipe.
        modules: modules to import before the work arrives.
    """
    # else each worker starts a thread per core
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for module in modules:
        with suppress(ImportError):  # the work reports a missing module itself
            import_module(module)
    with suppress(EOFError, BrokenPipeError):  # the parent has exited
        _fork_workers(Connection(orders), [(file, Connection(pipe)) for file, pipe in worker_ends])
    sys.stderr.flush()
    os._exit(0)  # at once: the parent waits, and tearing down the imports takes time


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
        orders.recv()  # blocks until the other end is closed
    for pid in pids:
        os.waitpid(pid, 0)


def _receive_work(orders: Connection) -> Any:
    """Return the last work before None. Errors of earlier ones are ignored."""
    work = None
    error_of_work = None
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
        work = message
        error_of_work = None
    if error_of_work is not None:
        raise error_of_work
    return work


def _answer_question(
    orders: Connection, question: Question, work: Any, error_of_work: Exception | None
) -> None:
    """Compute the answer in a forked process: libraries may start threads, which this process must not."""
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
        os._exit(1)  # it died without an answer; the caller sees this exit


def _fork_worker(
    work: Any, number: int, orders: Connection, worker_ends: list[tuple[int, Connection]]
) -> int:
    """Fork a worker that serves a pipe; return its pid in the parent, never in the worker."""
    pid = os.fork()
    if pid:
        return pid
    try:
        orders.close()
        for index, (_, pipe) in enumerate(worker_ends):
            if index != number:  # else its EOF would not be seen while this process lives
                pipe.close()
        file, pipe = worker_ends[number]
        _serve(work, pipe, mmap.mmap(file, ITEMS_AHEAD * SHELF_BYTES))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(0)


def _serve(work: Callable[[Any], Any], pipe: Connection, memory: mmap.mmap) -> None:
    """Run a worker: send results for items, until the other end of the pipe is closed."""
    queue: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def receive() -> None:
        # a thread, so that the sender of an item never blocks while this process sends a large result
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
            except Exception as error:  # raised by the parent process
                result = Failure(portable_error(error))
            _send_result(pipe, memoryview(memory)[count % ITEMS_AHEAD * SHELF_BYTES :][:SHELF_BYTES], result)
            count += 1


def _send_result(pipe: Connection, shelf: memoryview, result: object) -> None:
    """Send a result; its arrays through shared memory if they fit."""
    arrays = list[memoryview]()
    head = pickle.dumps(result, 5, buffer_callback=lambda array: arrays.append(array.raw()))
    sizes = [array.nbytes for array in arrays]
    if _array_offsets(sizes)[-1] > len(shelf):
        pipe.send((pickle.dumps(result, 5), None))
        return
    for array, offset in zip(arrays, _array_offsets(sizes), strict=False):
        shelf[offset : offset + array.nbytes] = array
    pipe.send((head, sizes))


def receive_result(pipe: Connection, shelf: memoryview) -> Any:
    """Receive the result that `_send_result` sent."""
    head, sizes = pipe.recv()
    if sizes is None:
        return pickle.loads(head)
    arrays = [
        shelf[offset : offset + size] for offset, size in zip(_array_offsets(sizes), sizes, strict=False)
    ]
    return pickle.loads(head, buffers=arrays)


def _array_offsets(sizes: Sequence[int]) -> list[int]:
    """Return the aligned offsets of arrays of these sizes, and the end of the last."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets
