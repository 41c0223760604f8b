"""Turn a hang or a lost rank into one error line and the Python stacks of all ranks.

A collective that one rank never enters blocks all others silently. So every rank has a watchdog thread. When
the rank makes no progress for too long, when a collective fails because its peer is gone, or when the process
gets a signal and makes no progress, the thread calls the other ranks through the store of the rendezvous.
Each writes its status there. The first to call waits a few seconds for them, reports in one line who is
missing and where the others are, prints the stacks, and all ranks exit.

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
from mega_train.fault_tolerance.error_reporting import RankLostError, write_error_file
from mega_train.fault_tolerance.signal_handler import EXIT_SIGNALS

# exit codes: a rank hung or was lost; the process was terminated
EXIT_RANK_LOST = 3
EXIT_TERMINATED = 128 + signal.SIGTERM
_PACKAGES = ("mega_train", "mega_model", "mega_schema")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status of a rank.

    Attributes:
        frame: its innermost function of this project, and the axis it communicates over.
        idle: seconds without progress.
        stacks: of its threads, as text.
    """

    rank: int
    host: str
    frame: str
    idle: float
    stacks: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Watchdog:
    """Monitors a rank: `with Watchdog(...) as watchdog: ...`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        limit: float,
        progress: Callable[[], Hashable],
        status: Callable[[], tuple[str, str]],
        out: TextIO,
        sigterm_grace: float = 0,
        reply_timeout: float = 5.0,
        tick: float = 0.5,
        exit: Callable[[int], None] = os._exit,
    ) -> None:
        """
        Args:
            store: of the rendezvous; the watchdog opens its own connection.
            limit: seconds without progress that count as a hang.
            progress: a value that changes whenever the rank makes progress.
            status: the progress of the run and how to resume it, for the error line.
            sigterm_grace: seconds without progress that count as a hang after a signal; 0 ends the process at
                once. Otherwise a signal handler handles the signals.
            reply_timeout: seconds that the other ranks have to reply.
            tick: seconds between two checks.
            exit: ends the process.
        """
        # separate connections: a call to a store that is cut off may never return
        self._listener_store, self._store = (
            PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self.rank = rank
        self.world = world
        self.limit = limit
        self.reply_timeout = reply_timeout
        self._sigterm_grace = sigterm_grace
        self._progress = progress
        self._status = status
        self._out = out
        self._tick = tick
        self._exit = exit
        self._main = threading.main_thread().ident
        self._peer_error: Exception | None = None
        self._was_called = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._call_listener = threading.Thread(
            target=self._listen_for_calls, name="watchdog's ear", daemon=True
        )

    def __enter__(self) -> Self:
        self._store.set(f"host {self.rank}", socket.gethostname())
        if not self._sigterm_grace:
            self._previous_handler = signal.signal(
                signal.SIGTERM, lambda *_: None
            )  # what counts is the byte in the pipe
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        self._call_listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        if not self._sigterm_grace:
            signal.signal(signal.SIGTERM, self._previous_handler)
        self._wake_writer.send(b"\0")
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def on_peer_lost(self, error: Exception) -> NoReturn:
        """Handle a failed collective: find and report the lost rank, then exit."""
        self._peer_error = error
        self._wake_writer.send(b"\0")
        while True:
            threading.Event().wait()

    def on_error(self, error: MegaError) -> NoReturn:
        """Handle an error with which the run cannot continue. The first rank that has it reports it.

        The others exit silently, and so do ranks that lose this rank by it.
        """
        try:
            number = self._call_with_timeout(self.reply_timeout, lambda: self._store.add("causes", 1))
        except (RuntimeError, TimeoutError):
            number = 1  # no other rank can have reported it
        if number == 1:
            write_error_file(f"error: {error}")
            self._out.write(f"error: {error}\n")
            self._out.flush()
        sys.exit(MISTAKE)

    def _listen_for_calls(self) -> None:
        try:
            while not self._done.wait(self._tick):
                if self._listener_store.check(["calls"]):
                    return self._was_called.set()
        except RuntimeError:
            return  # no rank can call any more; this rank's own state is still checked

    def _watch(self) -> None:
        # signal_time, signal_name: of the first signal that arrived; 0 and empty before
        last_progress = self._progress()
        progress_time = time.monotonic()
        signal_time = 0.0
        signal_name = ""
        while True:
            readable, _, _ = select.select([self._wake_reader], [], [], self._tick)
            numbers = self._wake_reader.recv(64) if readable else b""
            if received := [signal.Signals(number).name for number in numbers if number in EXIT_SIGNALS]:
                signal_time = signal_time or time.monotonic()
                signal_name = signal_name or received[0]
            if self._done.is_set():
                return
            progress = self._progress()
            if progress != last_progress:
                last_progress = progress
                progress_time = time.monotonic()
            idle = time.monotonic() - progress_time
            if signal_time and min(idle, time.monotonic() - signal_time) >= self._sigterm_grace:
                delay = f", and made no progress for {idle:.0f} s" if self._sigterm_grace else ""
                return self._call_ranks(f"received {signal_name}{delay}", idle, EXIT_TERMINATED)
            if self._peer_error is not None:
                return self._call_ranks(
                    f"lost another rank ({_gloo_cause(self._peer_error)})", idle, EXIT_RANK_LOST
                )
            if idle > self.limit:
                return self._call_ranks(f"no progress for {idle:.0f} s", idle, EXIT_RANK_LOST)
            if self._was_called.is_set():
                return self._call_ranks("another rank called", idle, EXIT_RANK_LOST)

    def _call_ranks(self, reason: str, idle: float, code: int) -> None:
        """Publish this rank's status; the first to call collects those of the others and reports."""
        own_status = self._own_status(idle)
        try:
            answers = self._call_with_timeout(
                2 * self.reply_timeout, lambda: self._gather_statuses(own_status)
            )
            if answers is not None:
                diagnosis, statuses = answers
                # if all ranks were terminated, there is nothing to diagnose
                was_killed = code == EXIT_TERMINATED and not self._sigterm_grace
                is_expected = was_killed and len(statuses) == self.world
                self._report(reason, "" if is_expected else diagnosis, () if is_expected else statuses)
                self._call_with_timeout(self.reply_timeout, lambda: self._store.set("said", ""))
        except (RuntimeError, TimeoutError) as error:
            description = f"{reason}, and the rendezvous store does not answer ({_gloo_cause(error)})"
            self._report(
                description,
                f"{own_status.name} in {own_status.frame} for {own_status.idle:.0f} s",
                [own_status],
            )
        sys.stdout.flush()
        self._exit(code)

    def _gather_statuses(self, own_status: RankStatus) -> tuple[str, list[RankStatus]] | None:
        """Return the diagnosis and the statuses on the first rank that calls; the others wait for its report.

        None, where nothing is left to report.
        """
        if self._store.check(["causes"]):
            return None  # the cause was already reported
        first = self._store.add("calls", 1) == 1
        self._store.set(f"status {self.rank}", json.dumps(asdict(own_status)))
        if not first:
            self._wait_until(lambda: self._store.check(["said"]), 2 * self.reply_timeout)
            return None
        keys = [f"status {rank}" for rank in range(self.world)]
        self._wait_until(lambda: self._store.check(keys), self.reply_timeout)
        answers = [self._store.get(key) for key in keys if self._store.check([key])]
        hosts = {rank: self._store.get(f"host {rank}").decode() for rank in range(self.world)}
        statuses = [RankStatus(**json.loads(answer)) for answer in answers]
        return diagnose(statuses, hosts), statuses

    def _call_with_timeout(self, seconds: float, function: Callable[[], T]) -> T:
        """Call `function` in a thread, which is abandoned after `seconds`."""
        answer: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(function())
            except RuntimeError as error:
                answer.put(error)

        threading.Thread(target=run, name="watchdog's question", daemon=True).start()
        try:
            result = answer.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"for {seconds:g} s") from None
        if isinstance(result, RuntimeError):
            raise result
        return result

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until `condition` holds, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._tick / 10)

    def _report(self, reason: str, diagnosis: str, statuses: Sequence[RankStatus]) -> None:
        position, hint = self._status()
        where = f"rank {self.rank}, {position}"
        error = (
            RankLostError(where, reason, found=diagnosis, hint=hint)
            if diagnosis
            else RankLostError(where, reason, hint=hint)
        )
        line = f"error: {error}"
        write_error_file(line)
        self._out.write(f"{line}\n{format_stacks(statuses)}")
        self._out.flush()

    def _own_status(self, idle: float) -> RankStatus:
        frames = sys._current_frames()
        main = frames.pop(self._main or 0, None)
        if self._peer_error is not None:  # the main thread waits in `on_peer_lost`
            main = [frame for frame, _ in traceback.walk_tb(self._peer_error.__traceback__)][-1]
        texts = traceback.format_stack(main)
        for thread in threading.enumerate():
            if thread.ident in frames and not thread.name.startswith("watchdog"):
                texts += [f"  thread {thread.name}\n", *traceback.format_stack(frames[thread.ident])]
        return RankStatus(self.rank, socket.gethostname(), current_frame(main), idle, "".join(texts))


def current_frame(frame: FrameType | None) -> str:
    """Describe the innermost function of this project on a stack, and the axis it communicates over."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _PACKAGES:
            axes = [value.name for value in frame.f_locals.values() if isinstance(value, Axis)]
            axis_text = f" over {axes[0]}" if axes else ""
            return f"{frame.f_code.co_qualname}{axis_text} ({module.rpartition('.')[2]}.py:{frame.f_lineno})"
        frame = frame.f_back
    return "code of others"


def diagnose(statuses: Sequence[RankStatus], hosts: Mapping[int, str]) -> str:
    """Describe who does not reply and where the others are, the smallest group first."""
    answered = {status.rank for status in statuses}
    parts = [f"rank {rank} ({host}) does not answer" for rank, host in hosts.items() if rank not in answered]
    by_frame: dict[str, list[RankStatus]] = {}
    for status in statuses:
        by_frame.setdefault(status.frame, []).append(status)
    for frame, group in sorted(by_frame.items(), key=lambda item: len(item[1])):
        idle = max(status.idle for status in group)
        ranks = (
            group[0].name if len(group) == 1 else f"ranks {_format_ranges([status.rank for status in group])}"
        )
        parts.append(f"{ranks} in {frame} for {idle:.0f} s")
    return ", ".join(parts)


def format_stacks(statuses: Sequence[RankStatus]) -> str:
    """Format the stacks of all ranks."""
    return "".join(f"--- stacks of {status.name}\n{status.stacks}" for status in statuses)


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format 1, 2, 3, 7 as "1-3 and 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " and ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gloo_cause(error: Exception) -> str:
    """Extract the cause of a failed collective from gloo's message."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
