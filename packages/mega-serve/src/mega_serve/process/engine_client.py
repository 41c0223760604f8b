"""The engine process as the HTTP application sees it: started, watched, restarted, and asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mega_serve.engine.interfaces import (
    EngineDeadError,
    EngineOverloadedError,
    EngineUnavailableError,
    ModelInfo,
)
from mega_serve.engine.requests import EngineRequest, EngineStats, SequenceOutput
from mega_serve.process.exit_codes import describe_exit
from mega_serve.process.frames import FrameDecoder, FrameError, encode_frame
from mega_serve.process.output_buffer import OutputBuffer

logger = logging.getLogger("mega.serve.engine")

EngineStatus = Literal["loading", "ready", "dead"]
_READ_BYTES = 1 << 18
_WATCH_SECONDS = 0.25  # between two looks at the heartbeat
_EXIT_SECONDS = 5.0  # for a process whose socket was closed to end by itself
_STABLE_SECONDS = 60.0  # of service after which the back-off begins anew
_MIN_RETRY_AFTER = 1.0
_MAX_RETRY_AFTER = 300.0
_UNKNOWN_RETRY_AFTER = 5.0  # before any speed was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to run the engine process.

    Attributes:
        factory: `module:function` that makes a `LoadedEngine` of the options.
        options: JSON values, for the factory. The client adds the `iteration` that was served if it starts
            the engine again.
        environment: of the process; None inherits it.
        queue_requests, queue_tokens: bounds of the requests that the engine has, see `Limits`.
        heartbeat_timeout: seconds without a step or a heartbeat after which the engine is taken for hung.
        log_prompts: the engine logs messages of unexpected exceptions, which may quote a prompt.
        restart: start the engine again when it has died.
        first_delay, max_delay: seconds before the first restart, doubled for each further one.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=lambda: {"engine": None})
    environment: Mapping[str, str] | None = None
    queue_requests: int = 1024
    queue_tokens: int = 1_000_000
    heartbeat_timeout: float = 30.0
    log_prompts: bool = False
    restart: bool = True
    first_delay: float = 1.0
    max_delay: float = 60.0


@dataclass(slots=True)
class _PendingRequest:
    """A request that the engine has.

    Attributes:
        tokens: what is left of its `max_total_tokens`, for the queue's bound.
    """

    tokens: int
    buffer: OutputBuffer


@dataclass(slots=True)
class _Child:
    """A running engine process and our end of its socket."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: object) -> None:
        """Send without waiting; the queue's bounds also bound what may be unsent."""
        if not self.writer.is_closing():
            self.writer.write(encode_frame(message))


class EngineProcessClient:
    """An `EngineClient` whose engine is a child process. Used from one event loop.

    Args:
        clock: seconds, monotonic.

    Attributes:
        status: "loading" until the model is loaded, again while a dead engine is restarted; "dead" for good.
        failure: why the engine is dead for good, one line.
        is_refused: whether the factory refused the options, which a restart cannot mend.
        restarts: how often the engine was started again.
        rejections: requests that the full queue refused.
    """

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.status: EngineStatus = "loading"
        self.failure = ""
        self.is_refused = False
        self.restarts = 0
        self.rejections = 0
        self._clock = clock
        self._model: ModelInfo | None = None
        self._stats = EngineStats()
        self._child: _Child | None = None
        self._pending: dict[str, _PendingRequest] = {}
        self._pending_tokens = 0
        self._last_frame = clock()
        self._number = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._status_changed = asyncio.Condition()

    @property
    def model(self) -> ModelInfo:
        """The served model.

        Raises:
            EngineUnavailableError: it was never loaded yet.
        """
        if self._model is None:
            raise EngineUnavailableError("the model is loading")
        return self._model

    @property
    def stats(self) -> EngineStats:
        """The newest load that the engine reported."""
        return self._stats

    @property
    def is_alive(self) -> bool:
        """Whether the engine stepped, or waited for work, within the heartbeat's limit."""
        return self.status == "ready" and self._silence < self.settings.heartbeat_timeout

    @property
    def pending_requests(self) -> int:
        """Requests that the engine has."""
        return len(self._pending)

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return self._child.process.pid if self._child else None

    @property
    def _silence(self) -> float:
        return self._clock() - self._last_frame

    async def start(self) -> None:
        """Start the engine process; return before the model is loaded."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_status(self, *statuses: EngineStatus) -> EngineStatus:
        """Wait until the status is one of `statuses`, and return it."""
        async with self._status_changed:
            await self._status_changed.wait_for(lambda: self.status in statuses)
        return self.status

    async def close(self) -> None:
        """End the process; requests in it raise EngineUnavailableError."""
        self.cut_requests("the server is stopping")
        if self._supervisor:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._set_status("dead")

    def cut_requests(self, message: str) -> None:
        """Let all requests of the engine raise EngineUnavailableError, so that each gets a response."""
        for request in self._pending.values():
            request.buffer.fail(EngineUnavailableError(message))

    async def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        """Yield the outputs of a request; see `EngineClient.generate`."""
        if self.status != "ready" or self._child is None:
            state = "is dead" if self.status == "dead" else "is loading the model"
            raise EngineUnavailableError(f"the engine {state}")
        self._check_queue(request)
        wire_id = request.request_id
        if wire_id in self._pending:  # ids come from clients, who may repeat them
            self._number += 1
            wire_id = f"{wire_id}#{self._number}"
        child = self._child
        pending = _PendingRequest(tokens=request.max_total_tokens, buffer=OutputBuffer())
        self._pending[wire_id] = pending
        self._pending_tokens += pending.tokens
        sequences = request.rows
        try:
            child.send({"add": replace(request, request_id=wire_id)})
            while sequences:
                for output in await pending.buffer.take():
                    sequences -= output.finish_reason is not None
                    yield (
                        output
                        if wire_id == request.request_id
                        else replace(output, request_id=request.request_id)
                    )
        finally:
            del self._pending[wire_id]
            self._pending_tokens -= pending.tokens
            if sequences and child is self._child:
                child.send({"abort": wire_id})

    def _check_queue(self, request: EngineRequest) -> None:
        """Refuse a request that would overfill the queue; the first of an idle engine always fits.

        Raises:
            EngineOverloadedError
        """
        tokens = self._pending_tokens + request.max_total_tokens
        settings = self.settings
        if not self._pending or (
            len(self._pending) < settings.queue_requests and tokens <= settings.queue_tokens
        ):
            return
        self.rejections += 1
        speed = self._stats.tokens_per_second
        seconds = self._pending_tokens / speed if speed > 0 else _UNKNOWN_RETRY_AFTER
        message = (
            f"the queue is full: {len(self._pending):,} requests of at most {settings.queue_requests:,}, "
            f"{self._pending_tokens:,} + {request.max_total_tokens:,} tokens of at most "
            f"{settings.queue_tokens:,}"
        )
        raise EngineOverloadedError(message, min(max(seconds, _MIN_RETRY_AFTER), _MAX_RETRY_AFTER))

    async def _supervise(self) -> None:
        """Run engine processes, one after another, until one must not be started again."""
        delay = self.settings.first_delay
        while True:
            start = self._clock()
            try:
                reason = await self._run_child()
            except Exception:  # whatever it is, the server must not be left without an engine
                logger.exception("the engine cannot be watched")
                reason = "it cannot be watched, see the log"
            self._fail_pending(reason)
            if not self.is_refused:  # the command ends with that line
                logger.error("the engine stopped: %s", reason)
            # a load that fails the first time fails every time: missing library, too little memory
            if self.is_refused or not self.settings.restart or self._model is None:
                self.failure = reason
                await self._set_status("dead")
                return
            await self._set_status("loading")
            if self._clock() - start > _STABLE_SECONDS:
                delay = self.settings.first_delay
            await asyncio.sleep(delay)
            delay = min(2 * delay, self.settings.max_delay)
            self.restarts += 1

    async def _run_child(self) -> str:
        """Run one engine process to its end. Return why it ended."""
        try:
            child = await self._spawn()
        except OSError as error:  # too little memory, too many processes or files: perhaps not for long
            return f"its process cannot be started: {error.strerror}"
        self._child = child
        reason = "the server is stopping"
        try:
            options = dict(self.settings.options)
            if self._model is not None:  # started again: the same weights, though the run may have newer ones
                options["iteration"] = self._model.iteration
            child.send({"load": options, "log_prompts": self.settings.log_prompts})
            reading = asyncio.create_task(self._read(child))
            watching = asyncio.create_task(self._watch())
            try:
                ended_tasks, _ = await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (reading, watching):
                    task.cancel()
                await asyncio.gather(reading, watching, return_exceptions=True)
            reason = ended_tasks.pop().result()
        finally:
            self._child = None
            code = await _end_process(child)
        return reason or f"its process {describe_exit(code)}"

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)  # unless the process starts
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # nothing is imported from the working directory
                "-m",
                "mega_serve.process.engine_process",
                str(theirs.fileno()),
                self.settings.factory,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else asyncio.subprocess.DEVNULL,
                env=self.settings.environment,
                start_new_session=True,  # Ctrl-C is for this process, which drains first
            )
            stack.pop_all()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Child(process, reader, writer)

    async def _read(self, child: _Child) -> str:
        """Take the frames of the engine. Return "" at the end of the stream, or what is wrong."""
        decoder = FrameDecoder()
        while True:
            try:
                data = await child.reader.read(_READ_BYTES)
                messages = decoder.feed(data)
            except FrameError as error:
                return str(error)
            except ConnectionError:  # reset, or the pipe broke in a write, which the reader reports too
                return ""
            if not data:
                return ""
            self._last_frame = self._clock()
            for message in messages:
                if "refused" in message:
                    self.is_refused = True
                    return str(message["refused"])
                if "failed" in message:
                    return str(message["failed"])
                await self._handle(message)

    async def _handle(self, message: Mapping[str, Any]) -> None:
        if "outputs" in message:
            for values in message["outputs"]:
                request = self._pending.get(values["request_id"])
                if request:  # else aborted meanwhile
                    output = SequenceOutput.from_json(values)
                    used = min(len(output.token_ids), request.tokens)
                    request.tokens -= used
                    self._pending_tokens -= used
                    request.buffer.put(output)
        elif "stats" in message:
            self._stats = EngineStats.from_json(message["stats"])
        else:
            (values,) = message.values()  # "ready", or "model" after a swap
            self._model = ModelInfo(**values)
            await self._set_status("ready")

    async def _watch(self) -> str:
        """Return once a loaded engine has been silent for too long."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self.status == "ready" and not self.is_alive:
                await asyncio.sleep(
                    _WATCH_SECONDS
                )  # if it was this process that stood still, frames are here
                if not self.is_alive:
                    return f"it took no step for {self.settings.heartbeat_timeout:g} s"

    def _fail_pending(self, reason: str) -> None:
        for request in self._pending.values():
            request.buffer.fail(EngineDeadError(f"the engine stopped: {reason}"))

    async def _set_status(self, status: EngineStatus) -> None:
        self.status = status
        self._last_frame = self._clock()
        async with self._status_changed:
            self._status_changed.notify_all()


async def _end_process(child: _Child) -> int:
    """Close the socket, kill the process and the workers that it started. Return its exit code."""
    child.writer.close()
    if child.reader.at_eof():  # it closed the socket itself and is on its way out: keep its exit code
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.process.wait(), _EXIT_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
    return await child.process.wait()


def _has_descriptor(stream: Any) -> bool:
    """Tell whether a stream is a file of the operating system (a test may have replaced it)."""
    try:
        return isinstance(stream.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False
