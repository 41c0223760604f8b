"""An order to write (`writer`), carried out by a process of its own or, where memory is scarce, in place.

memory.lay_out(boxes)              # where each box's values go
memory.hold(order)                 # makes room and leaves the order there
…                                  # whoever has the values copies them to memory.map
writing = Background(memory)       # the values may change from now on only when it is done
writing.state()                    # None while it is busy
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mega_schema.checkpoint.writer_process import BYTES, DONE, FAILED, NOTE, Order, finish, write_shards

_MAIN = "from mega_schema.checkpoint.writer_process import main; main()"
_BOOT = f"import sys; sys.path.append(sys.argv.pop()); {_MAIN}"
_SOURCE_ROOT = str(Path(__file__).parents[2])
_ALIGNMENT = 64  # bytes; no dtype minds where its values begin
_TURN_SECONDS = 0.2  # seconds of writing in place between two looks
_KILLED = 1000  # and the signal that ended it: the state of a process that ended without a word
_BLOCKED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})


def describe_failure(state: int) -> str:
    """A state that is a failure, in words."""
    if state > _KILLED:
        return f"the process that writes was ended by {signal.Signals(state - _KILLED).name}"
    return "the process that writes ended with an error" if state == _KILLED else os.strerror(state)


class WriterHandle(Protocol):
    """An order being carried out.

    Attributes:
        bytes: written so far.
        note: what a person should know of a commit that succeeded.
    """

    bytes: int
    note: str

    def state(self) -> int | None:
        """None while it is busy with what it was last told; 0 when that is done; else `problem` says what."""

    def send(self, command: str) -> None:
        """COMMIT or DISCARD, to the one whose order has the commit."""

    def close(self) -> None:
        """Part from it."""


class SharedBuffer:
    """Memory that another process can read. It grows as it must and is kept for the next order.

    Attributes:
        map: where values go, at the places of `lay_out`.
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

    def plan(self, boxes: Sequence[Mapping[str, Any]], begin: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The boxes with the place of each one's values, the first at `begin`; and where the last ends."""
        planned = []
        for box in boxes:
            planned.append({**box, "at": begin})
            begin += -(-box["bytes"] // _ALIGNMENT) * _ALIGNMENT
        return planned, begin

    def stage(self, order: Order, order_start: int) -> mmap.mmap:
        """Make room for values up to `past`, and leave the order behind them.

        Raises:
            OSError: there is no such memory.
        """
        text = json.dumps(order).encode()
        if self.map is None or len(self.map) < order_start + len(text):
            self.map = None  # the values of the order before are not needed any more
            os.ftruncate(self.descriptor, order_start + len(text))
            self.map = mmap.mmap(self.descriptor, order_start + len(text))
        self.map[order_start : order_start + len(text)] = text
        self.order_range = (order_start, len(text))
        return self.map


class SubprocessWriter:
    """A process that carries out the order in a memory (a `Writing`).

    It hears no signal that a terminal or a scheduler sends to all processes of a run: it ends when it is
    done, or when the run is gone.
    """

    def __init__(self, memory: SharedBuffer) -> None:
        arguments = [os.getpid(), memory.descriptor, *memory.order_range, _SOURCE_ROOT]
        # a blocked signal stays blocked in the new process; here the next line lets it through again
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
        self._stdout, self._stdin = self._process.stdout, self._process.stdin
        os.set_blocking(self._stdout.fileno(), False)
        self._unread = b""
        self._state: int | None = None
        self.bytes, self.note = 0, ""

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
            return  # `state` finds out why

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
    """An order that is carried out by whoever asks how far it is (a `Writing`), from values nobody staged."""

    def __init__(self, order: Order, payload: Callable[[str, int], memoryview]) -> None:
        """
        Args:
            payload: the bytes of a namespace's box, by its number; one is asked for after another.
        """
        self._order, self._steps = order, write_shards(order, payload)
        self._state: int | None = None
        self.bytes, self.note = 0, ""

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
        """Nothing."""

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
