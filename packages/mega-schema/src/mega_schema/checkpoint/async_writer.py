"""Carry out an order of `writer_process` in a subprocess or, if memory is scarce, in this process.

buffer.plan(boxes)                 # assign an offset to each box's values
buffer.stage(order, end)           # allocate the buffer and write the order to it
…                                  # the caller copies the values to buffer.map
writer = SubprocessWriter(buffer)  # the values must not change until it is done
writer.state()                     # None while it is busy
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mega_schema.checkpoint.shard_file import BoxRecord
from mega_schema.checkpoint.writer_process import BYTES, DONE, FAILED, NOTE, WriteOrder, finish, write_shards

_MAIN = "from mega_schema.checkpoint.writer_process import main; main()"
# Run with -I -S: no site-packages and no environment, so that Python starts in a few hundredths of a second.
# The last argument is the folder to import mega_schema from.
_BOOT = f"import sys; sys.path.append(sys.argv.pop()); {_MAIN}"
_SOURCE_ROOT = str(Path(__file__).parents[2])
_ALIGNMENT = 64  # bytes; enough for every dtype
_TURN_SECONDS = 0.2  # of writing per call of `state`
_KILLED = 1000  # plus the signal's number: the state of a process that ended without a report
_BLOCKED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})


def describe_failure(state: int) -> str:
    """Describe a writer's state that is a failure."""
    if state > _KILLED:
        return f"the writer process was killed by {signal.Signals(state - _KILLED).name}"
    return "the writer process ended with an error" if state == _KILLED else os.strerror(state)


class WriterHandle(Protocol):
    """A write order that is being carried out.

    Attributes:
        bytes: written so far.
        note: a message for the user about a commit that succeeded.
    """

    bytes: int
    note: str

    def state(self) -> int | None:
        """Return None while the writer is busy with its last command, then 0 or a failure code."""

    def send(self, command: str) -> None:
        """Send COMMIT or DISCARD to the writer whose order has the commit."""

    def close(self) -> None:
        """Release the writer's resources."""


class SharedBuffer:
    """Memory that another process can read. It grows as needed and is reused for the next order.

    Attributes:
        map: the buffer; values go to the offsets that `plan` returned.
        order_range: offset and length of the staged order.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("mega-save")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)
        self.map: mmap.mmap | None = None
        self.order_range = (0, 0)  # place and length

    def plan(self, boxes: Sequence[BoxRecord], begin: int = 0) -> tuple[list[BoxRecord], int]:
        """Return the boxes with a `buffer_offset` for their values, the first at `begin`; and the end."""
        planned = list[BoxRecord]()
        for box in boxes:
            planned.append({**box, "buffer_offset": begin})
            begin += -(-box["bytes"] // _ALIGNMENT) * _ALIGNMENT
        return planned, begin

    def stage(self, order: WriteOrder, order_start: int) -> mmap.mmap:
        """Allocate room for values up to `order_start`, and write the order after them.

        Raises:
            OSError: the memory is not available.
        """
        text = json.dumps(order).encode()
        if self.map is None or len(self.map) < order_start + len(text):
            self.map = None  # values of the previous order are not needed any more
            os.ftruncate(self.descriptor, order_start + len(text))
            self.map = mmap.mmap(self.descriptor, order_start + len(text))
        self.map[order_start : order_start + len(text)] = text
        self.order_range = (order_start, len(text))
        return self.map


class SubprocessWriter:
    """A process that carries out the order in a shared buffer (a `WriterHandle`).

    It blocks the signals that a terminal or a scheduler sends to all processes of a run, and exits when it is
    done or when the run has ended.
    """

    def __init__(self, memory: SharedBuffer) -> None:
        arguments = [os.getpid(), memory.descriptor, *memory.order_range, _SOURCE_ROOT]
        # the new process inherits the blocked signals; this one restores its mask below
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[memory.descriptor],
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._stdin = self._process.stdin
        os.set_blocking(self._stdout.fileno(), False)
        self._unread = b""
        self._state: int | None = None
        self.bytes = 0
        self.note = ""

    def state(self) -> int | None:
        while True:
            try:
                text = os.read(self._stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return self._state
            if not text:
                if self._state is None:
                    self._state = _KILLED + max(0, -self._process.wait())
                return self._state
            *lines, self._unread = (self._unread + text).split(b"\n")
            for line in lines:
                self._handle_line(*line.decode().split(" ", 1))

    def send(self, command: str) -> None:
        self._state = None
        try:
            self._stdin.write(f"{command}\n".encode())
        except BrokenPipeError:
            return  # `state` reports why

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()
        self._process.wait()

    def _handle_line(self, word: str, rest: str = "") -> None:
        if word == BYTES:
            self.bytes = int(rest)
        elif word == NOTE:
            self.note = rest
        elif word in (DONE, FAILED):
            self._state = int(rest or 0)


class InProcessWriter:
    """An order carried out in steps by the calls of `state` (a `WriterHandle`), without staging."""

    def __init__(self, order: WriteOrder, payload: Callable[[str, int], memoryview]) -> None:
        """Prepare to write an order.

        Args:
            payload: returns the bytes of a namespace's box, by its number; called for one box after another.
        """
        self._order = order
        self._steps = write_shards(order, payload)
        self._state: int | None = None
        self.bytes = 0
        self.note = ""

    def state(self) -> int | None:
        if self._state is None:
            self._state = _errno_of(self._advance)
        return self._state

    def send(self, command: str) -> None:
        def end() -> int:
            self.note = finish(self._order, command)
            return 0

        self._state = _errno_of(end)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _advance(self) -> int | None:
        until = time.monotonic() + _TURN_SECONDS
        for count in self._steps:
            self.bytes += count
            if time.monotonic() > until:
                return None
        return 0


def _errno_of(work: Callable[[], int | None]) -> int | None:
    try:
        return work()
    except OSError as error:
        return error.errno or errno.EIO
