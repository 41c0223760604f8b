"""Turns a run that hangs, or that has lost a rank, into one line and the Python stacks of all ranks.

A collective that one rank never enters makes all others wait in silence. Every rank therefore has a thread
that looks on: when the rank makes no progress for too long, when a collective fails because its peer is gone,
or when the process is told to end and gets no further, the thread calls the others over the store that the
ranks met at. Each leaves a sign there of where it stands, the first to call waits a few seconds for them,
says in one line who is missing and where the others are, prints the stacks, and all ranks leave.

The main thread may be inside a call that never returns, so nothing here needs it: signals arrive through a
file descriptor, and the process ends with `os._exit`.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import NoReturn, Self, TextIO, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from mega_model.distributed.mesh import Axis
from mega_schema.app.cli_runner import MISTAKE
from mega_schema.errors import MegaError
from mega_train.fault_tolerance.error_reporting import LostRank, tell_torchrun
from mega_train.fault_tolerance.signal_handler import TO_LEAVE

LOST, TOLD = 3, 128 + signal.SIGTERM  # exit codes: a rank hung or was lost, the process was told to end
_TOLD = "was told to end (SIGTERM)"
_OURS = ("mega_train", "mega_model", "mega_schema")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sign:
    """Where a rank stands.

    Attributes:
        place: the innermost function of ours that it is in, and over which axis.
        idle: seconds without progress.
        stacks: of its threads, as text.
    """

    rank: int
    host: str
    place: str
    idle: float
    stacks: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Watchdog:
    """Looks on while a rank works: `with Watchdog(...) as watchdog: ...`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        limit: float,
        progress: Callable[[], Hashable],
        standing: Callable[[], tuple[str, str]],
        out: TextIO,
        hurry: float = 0,
        patience: float = 5.0,
        tick: float = 0.5,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """
        Args:
            store: where the ranks met; a connection of its own is made.
            limit: seconds without progress that are a hang.
            progress: changes whenever the rank gets on.
            standing: how far the run is, and how it can go on; for the line.
            hurry: seconds without progress that are a hang once the process was told to end; with 0 it then
                ends at once. Else someone else handles the signals.
            patience: seconds that the others have to answer.
            tick: seconds between two looks.
            leave: ends the process.
        """
        # a connection each: a call to a store that is cut off may never return
        self._heard, self._store = (
            PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self.rank, self.world, self.limit, self.patience = rank, world, limit, patience
        self._hurry = hurry
        self._progress, self._standing = progress, standing
        self._out, self._tick, self._leave = out, tick, leave
        self._main = threading.main_thread().ident
        self._lost: Exception | None = None
        self._called = threading.Event()
        self._awake, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watchdog", daemon=True)
        self._ear = threading.Thread(target=self._listen, name="watchdog's ear", daemon=True)

    def __enter__(self) -> Self:
        self._store.set(f"host {self.rank}", socket.gethostname())
        if not self._hurry:
            self._before = signal.signal(
                signal.SIGTERM, lambda *_: None
            )  # what counts is the byte in the pipe
        self._pipe_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        self._ear.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._pipe_before)
        if not self._hurry:
            signal.signal(signal.SIGTERM, self._before)
        self._wake.send(b"\0")
        self._thread.join()
        self._awake.close()
        self._wake.close()

    def lost(self, error: Exception) -> NoReturn:
        """A collective failed: find out who is gone, say so, and leave."""
        self._lost = error
        self._wake.send(b"\0")
        while True:
            threading.Event().wait()

    def failed(self, error: MegaError) -> NoReturn:
        """This rank found that the run cannot go on. Of all ranks that do, the first says so.

        The others that find it leave in silence, and so do those that lose this rank by it.
        """
        try:
            number = self._within(self.patience, lambda: self._store.add("causes", 1))
        except (RuntimeError, TimeoutError):
            number = 1  # nobody is there to have said it
        if number == 1:
            tell_torchrun(f"error: {error}")
            self._out.write(f"error: {error}\n")
            self._out.flush()
        sys.exit(MISTAKE)

    def _listen(self) -> None:
        try:
            while not self._done.wait(self._tick):
                if self._heard.check(["calls"]):
                    return self._called.set()
        except RuntimeError:
            return  # nobody can call any more; what happens to this rank itself is still seen

    def _look_on(self) -> None:
        last, since, told = self._progress(), time.monotonic(), 0.0  # since when the process is told to end
        while True:
            readable, _, _ = select.select([self._awake], [], [], self._tick)
            if readable and not TO_LEAVE.isdisjoint(self._awake.recv(64)):
                told = told or time.monotonic()
            if self._done.is_set():
                return
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            idle = time.monotonic() - since
            if told and min(idle, time.monotonic() - told) >= self._hurry:
                late = f", and made no progress for {idle:.0f} s" if self._hurry else ""
                return self._call(f"{_TOLD}{late}", idle, TOLD)
            if self._lost is not None:
                return self._call(f"lost another rank ({_cause(self._lost)})", idle, LOST)
            if idle > self.limit:
                return self._call(f"no progress for {idle:.0f} s", idle, LOST)
            if self._called.is_set():
                return self._call("another rank called", idle, LOST)

    def _call(self, reason: str, idle: float, code: int) -> None:
        """Leave a sign; the first to call waits for those of the others, and speaks for all."""
        mine = self._sign(idle)
        try:
            met = self._within(2 * self.patience, lambda: self._meet(mine))
            if met is not None:
                found, signs = met
                # who is told to end, with all its fellows, has nothing to explain
                whole = reason == _TOLD and len(signs) == self.world
                self._say(reason, "" if whole else found, () if whole else signs)
                self._within(self.patience, lambda: self._store.set("said", ""))
        except (RuntimeError, TimeoutError) as error:
            cut_off = f"{reason}, and the ranks' meeting place does not answer ({_cause(error)})"
            self._say(cut_off, f"{mine.name} in {mine.place} for {mine.idle:.0f} s", [mine])
        sys.stdout.flush()
        self._leave(code)

    def _meet(self, mine: Sign) -> tuple[str, list[Sign]] | None:
        """What the ranks found, for the first that asks; the others wait here until it has spoken.

        Nothing, where there is no more to say.
        """
        if self._store.check(["causes"]):
            return None  # it was said why a rank is gone
        first = self._store.add("calls", 1) == 1
        self._store.set(f"sign {self.rank}", json.dumps(asdict(mine)))
        if not first:
            self._until(lambda: self._store.check(["said"]), 2 * self.patience)
            return None
        everyone = [f"sign {rank}" for rank in range(self.world)]
        self._until(lambda: self._store.check(everyone), self.patience)
        answers = [self._store.get(key) for key in everyone if self._store.check([key])]
        hosts = {rank: self._store.get(f"host {rank}").decode() for rank in range(self.world)}
        signs = [Sign(**json.loads(answer)) for answer in answers]
        return verdict(signs, hosts), signs

    def _within(self, seconds: float, ask: Callable[[], T]) -> T:
        """What `ask` gives, asked in a thread that is left behind when it takes longer."""
        answer: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(ask())
            except RuntimeError as error:
                answer.put(error)

        threading.Thread(target=run, name="watchdog's question", daemon=True).start()
        try:
            found = answer.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"for {seconds:g} s") from None
        if isinstance(found, RuntimeError):
            raise found
        return found

    def _until(self, true: Callable[[], bool], seconds: float) -> None:
        """Wait until it is, or for these seconds."""
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(self._tick / 10)

    def _say(self, reason: str, found: str, signs: Sequence[Sign]) -> None:
        stood, hint = self._standing()
        where = f"rank {self.rank}, {stood}"
        error = (
            LostRank(where, reason, found=found, hint=hint) if found else LostRank(where, reason, hint=hint)
        )
        line = f"error: {error}"
        tell_torchrun(line)
        self._out.write(f"{line}\n{stacks(signs)}")
        self._out.flush()

    def _sign(self, idle: float) -> Sign:
        frames = sys._current_frames()
        main = frames.pop(self._main or 0, None)
        if self._lost is not None:  # it waits in `lost` since
            main = [frame for frame, _ in traceback.walk_tb(self._lost.__traceback__)][-1]
        texts = traceback.format_stack(main)
        for thread in threading.enumerate():
            if thread.ident in frames and not thread.name.startswith("watchdog"):
                texts += [f"  thread {thread.name}\n", *traceback.format_stack(frames[thread.ident])]
        return Sign(self.rank, socket.gethostname(), place(main), idle, "".join(texts))


def place(frame: FrameType | None) -> str:
    """The innermost function of ours on a stack, and the axis it works over where it knows one."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _OURS:
            axes = [value.name for value in frame.f_locals.values() if isinstance(value, Axis)]
            over = f" over {axes[0]}" if axes else ""
            return f"{frame.f_code.co_qualname}{over} ({module.rpartition('.')[2]}.py:{frame.f_lineno})"
        frame = frame.f_back
    return "code of others"


def verdict(signs: Sequence[Sign], hosts: Mapping[int, str]) -> str:
    """Who does not answer, and where the others are, the fewest first."""
    answered = {sign.rank for sign in signs}
    parts = [f"rank {rank} ({host}) does not answer" for rank, host in hosts.items() if rank not in answered]
    together: dict[str, list[Sign]] = {}
    for sign in signs:
        together.setdefault(sign.place, []).append(sign)
    for where, some in sorted(together.items(), key=lambda item: len(item[1])):
        idle = max(sign.idle for sign in some)
        who = some[0].name if len(some) == 1 else f"ranks {_ranges([sign.rank for sign in some])}"
        parts.append(f"{who} in {where} for {idle:.0f} s")
    return ", ".join(parts)


def stacks(signs: Sequence[Sign]) -> str:
    """The stacks of all ranks, as text for a person."""
    return "".join(f"--- stacks of {sign.name}\n{sign.stacks}" for sign in signs)


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3 and 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " and ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _cause(error: Exception) -> str:
    """What gloo says of a failed collective, without its place in gloo and its advice."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
