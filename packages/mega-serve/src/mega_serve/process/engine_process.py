"""The engine process: load the model, then step for as long as there is work.

    python -P -m mega_serve.process.engine_process FD MODULE:FUNCTION

FD is an inherited socket to the HTTP process. The first frame from it is `{"load": options, "log_prompts":
false}`; then come `{"add": request}` and `{"abort": request_id}`. Frames to it: `{"ready": model}` or
`{"refused": message}`; then `{"outputs": [...]}`, all of one step; `{"stats": ...}` at least every 0.2 s
between two steps and while idle; `{"model": ...}` when a newer checkpoint was swapped in; `{"failed":
message}` at the end, if another rank has ended. The process ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import select
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mega_schema.errors import MegaError
from mega_serve.engine.interfaces import ModelInfo, RankConnectionError
from mega_serve.engine.requests import EngineRequest, EngineStats, SequenceOutput
from mega_serve.process.failure_log import describe_failure
from mega_serve.process.frames import FrameDecoder, encode_frame
from mega_serve.process.parent_death import die_with_parent

logger = logging.getLogger("mega.serve.engine")

HEARTBEAT_SECONDS = 0.2
_READ_BYTES = 1 << 18
EXIT_REFUSED = 2
EXIT_FAILED = 1


class SteppableEngine(Protocol):
    """The scheduler and the model, one step at a time."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> object:
        """Drop a request, if it is not finished yet, and free its pages."""

    def step(self) -> Sequence[SequenceOutput]:
        """Run one batch and return what each sequence gained."""

    def stats(self) -> EngineStats:
        """Return the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A model that is ready to serve: what the factory returns.

    Attributes:
        between_steps: called before every step and while idle; swaps in a newer checkpoint of a training
            run, if there is one, and returns the new description.
        close: ends the other ranks; called once, after the last step.
    """

    core: SteppableEngine
    model: ModelInfo
    between_steps: Callable[[], ModelInfo | None] | None = None
    close: Callable[[], None] | None = None


EngineFactory = Callable[[Mapping[str, Any]], LoadedEngine]


class EngineLoop:
    """Move requests from the socket to the engine and outputs back.

    Args:
        log_prompts: messages of unexpected exceptions, which may quote a prompt, are logged.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        engine: LoadedEngine,
        connection: Connection,
        *,
        log_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = engine.core
        self._between_steps = engine.between_steps
        self._connection = connection
        self._log_prompts = log_prompts
        self._clock = clock
        self._last_stats = -HEARTBEAT_SECONDS
        self._unfinished: dict[str, set[int]] = {}  # request -> its sequences that run

    def run(self) -> int:
        """Serve until the socket is closed. Return the exit code."""
        try:
            return self._serve()
        except RankConnectionError as error:
            self._connection.send({"failed": str(error)})
            return EXIT_FAILED
        except Exception as error:  # Python's own traceback would quote the message
            self._log_failure("the engine failed between two steps", error)
            return EXIT_FAILED

    def _serve(self) -> int:
        while True:
            messages = self._connection.receive(0.0 if self._core.has_work else HEARTBEAT_SECONDS)
            if messages is None:
                return 0
            for message in messages:
                self._handle(message)
            model = self._between_steps() if self._between_steps else None
            if model is not None:
                self._connection.send({"model": model})
            if self._core.has_work and not self._step():
                return EXIT_FAILED
            if self._clock() - self._last_stats >= HEARTBEAT_SECONDS:
                self._last_stats = self._clock()
                self._connection.send({"stats": self._core.stats()})

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "abort" in message:
            self._unfinished.pop(message["abort"], None)
            self._core.abort(message["abort"])
            return
        request = EngineRequest.from_json(message["add"])
        self._unfinished[request.request_id] = set(range(request.rows))
        try:
            self._core.add(request)
        except Exception as error:  # one request that the engine cannot take must not end the others
            error_id = self._log_failure("the engine refused a request", error)
            self._unfinished.pop(request.request_id)
            self._connection.send(
                {"outputs": _build_error_outputs({request.request_id: set(range(request.rows))}, error_id)}
            )

    def _step(self) -> bool:
        """Run a step. Return false if it failed: the state of the engine is then unknown."""
        try:
            outputs = self._core.step()
        except RankConnectionError:
            raise
        except Exception as error:
            error_id = self._log_failure("a step of the engine failed", error)
            self._connection.send({"outputs": _build_error_outputs(self._unfinished, error_id)})
            return False
        for output in outputs:
            if output.finish_reason is not None:
                sequences = self._unfinished.get(output.request_id, set())
                sequences.discard(output.index)
                if not sequences:
                    self._unfinished.pop(output.request_id, None)
        if outputs:
            self._connection.send({"outputs": outputs})
        return True

    def _log_failure(self, event: str, error: Exception) -> str:
        """Log an exception under an id, and return the id."""
        error_id = uuid.uuid4().hex[:12]
        text = describe_failure(error, with_messages=self._log_prompts)
        logger.error("%s (error %s): %s", event, error_id, text)
        return error_id


class Connection:
    """The engine's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = FrameDecoder()
        self._poll = select.poll()  # select.select refuses descriptors above 1023
        self._poll.register(sock, select.POLLIN)

    def receive(self, timeout: float) -> list[Any] | None:
        """Return the messages that have arrived; wait for one up to `timeout` seconds; None: closed."""
        messages: list[Any] = []
        while self._poll.poll(1000 * (0.0 if messages else timeout)):
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            messages += self._decoder.feed(data)
            timeout = 0.0
        return messages

    def send(self, message: object) -> None:
        """Send a message; wait until the HTTP process has read what came before."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` reports the end
            self._socket.sendall(encode_frame(message))


def main(argv: Sequence[str]) -> int:
    """Run the engine process. Return its exit code."""
    descriptor, factory = argv
    die_with_parent()
    # the HTTP process drains after a signal to the whole group; it ends this one by closing the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(descriptor)))
    messages: list[Any] | None = []
    while not messages:
        messages = connection.receive(timeout=3600.0)
        if messages is None:
            return 0
    settings = messages[0]
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        engine = load_factory(factory)(settings["load"])
    except MegaError as error:
        connection.send({"refused": str(error)})
        return EXIT_REFUSED
    except RankConnectionError as error:
        connection.send({"failed": str(error)})
        return EXIT_FAILED
    connection.send({"ready": engine.model})
    code = EngineLoop(engine, connection, log_prompts=settings["log_prompts"]).run()
    if engine.close is not None and code == 0:
        engine.close()
    return code


def load_factory(name: str) -> EngineFactory:
    """Import `module:function`. The name is one of this package's, never of a request or a checkpoint."""
    module, _, function = name.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), function)
    return factory


def _build_error_outputs(unfinished: Mapping[str, set[int]], error_id: str) -> list[SequenceOutput]:
    message = f"the engine failed on this request (error {error_id}; see the server's log)"
    return [
        SequenceOutput(request_id=request_id, index=index, finish_reason="error", error=message)
        for request_id, sequences in unfinished.items()
        for index in sorted(sequences)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
