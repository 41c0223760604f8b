"""Commands of rank 0 to the other ranks of a model: JSON frames over a Unix socket, never a pickle.

The socket is in the private folder of the ranks, and a connection begins with that folder's token. An idle
rank waits in a read, which costs nothing. Both ends see at once that the other process has ended.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mega_serve.engine.interfaces import RankConnectionError
from mega_serve.execution.rendezvous_folder import (
    TOKEN_BYTES,
    RendezvousFolder,
    open_private_folder,
    read_token,
    socket_address,
)
from mega_serve.process.frames import FrameDecoder, encode_frame

logger = logging.getLogger("mega.serve.engine")

JOIN_SECONDS = 600.0  # for the other ranks to start: an interpreter imports torch from a slow disk
PING_SECONDS = 5.0
_HANDSHAKE_SECONDS = 5.0
_HANG_UP_SECONDS = 1.0  # between gloo's error and the end of the process that caused it
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 18
_RANK = struct.Struct(">I")
_PONG = b"\x01"


class CommandSender:
    """Rank 0's end: a listening socket, then a connection to every other rank.

    Args:
        ranks: of the model, rank 0 included.
        clock: seconds, monotonic.
    """

    def __init__(
        self, folder: RendezvousFolder, ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._token = folder.token
        self._ranks = ranks
        self._clock = clock
        self._connections: dict[int, socket.socket] = {}
        self._last_command = clock()
        self._is_closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with open_private_folder(folder.path) as descriptor:
            self._listener.bind(socket_address(descriptor))
        self._listener.listen(ranks)

    def accept_ranks(self, check: Callable[[], None], timeout: float = JOIN_SECONDS) -> None:
        """Wait until every other rank has connected with the token; refuse other connections.

        Args:
            check: called while waiting; raises if a rank cannot come any more.

        Raises:
            RankConnectionError: not all came in time.
        """
        end = self._clock() + timeout
        self._listener.settimeout(_POLL_SECONDS)
        while len(self._connections) < self._ranks - 1:
            check()
            if self._clock() > end:
                absent = sorted(set(range(1, self._ranks)) - self._connections.keys())
                raise RankConnectionError(f"ranks {absent} did not connect within {timeout:g} s")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            rank = self._authenticate(connection)
            if rank is None:
                logger.error("refused a connection to the ranks: no rank, or another token")
                connection.close()
            else:
                self._connections[rank] = connection
        self._listener.close()

    def _authenticate(self, connection: socket.socket) -> int | None:
        """Return the rank that a connection proves to be; None for any other."""
        connection.settimeout(_HANDSHAKE_SECONDS)
        try:
            greeting = _receive_exactly(connection, TOKEN_BYTES + _RANK.size)
        except OSError:
            return None
        if len(greeting) < TOKEN_BYTES + _RANK.size:
            return None
        if not hmac.compare_digest(greeting[:TOKEN_BYTES], self._token):  # in constant time
            return None
        connection.settimeout(None)
        rank = int(_RANK.unpack(greeting[TOKEN_BYTES:])[0])
        return rank if 0 < rank < self._ranks and rank not in self._connections else None

    def watch(self, on_lost: Callable[[int], None]) -> None:
        """Call `on_lost` with a rank that ends, from a thread, unless `close` was called before."""
        threading.Thread(target=self._watch, args=[on_lost], name="ranks", daemon=True).start()

    def _watch(self, on_lost: Callable[[int], None]) -> None:
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)
        [(descriptor, _), *_] = poll.poll()
        if not self._is_closing:
            on_lost(ranks[descriptor])

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to every rank. Dataclasses become JSON objects, ranges lists.

        Raises:
            RankConnectionError: a rank has ended.
        """
        frame = encode_frame(command, default=list)
        for rank, connection in self._connections.items():
            try:
                connection.sendall(frame)
            except (BrokenPipeError, ConnectionResetError):
                raise RankConnectionError(f"rank {rank} has ended") from None
        self._last_command = self._clock()

    @contextlib.contextmanager
    def name_lost_rank(self) -> Iterator[None]:
        """Replace the RuntimeError of a collective by the rank whose end caused it, if one has ended.

        Raises:
            RankConnectionError: a rank has ended.
        """
        try:
            yield
        except RuntimeError:  # gloo has no class for it
            for rank in _find_hung_up(self._connections):
                raise RankConnectionError(f"rank {rank} has ended") from None
            raise

    def ping(self) -> None:
        """Wait for an answer of every rank, if there was no command for `PING_SECONDS`.

        A rank that hangs holds up the caller: the engine is then silent, and is taken for hung.

        Raises:
            RankConnectionError: a rank has ended.
        """
        if self._clock() - self._last_command < PING_SECONDS:
            return
        self.send({"ping": True})
        for rank, connection in self._connections.items():
            if _receive_exactly(connection, len(_PONG)) != _PONG:
                raise RankConnectionError(f"rank {rank} has ended")

    def close(self) -> None:
        """End the loops of the other ranks, and close the connections."""
        self._is_closing = True
        with contextlib.suppress(RankConnectionError):
            self.send({"stop": True})
        for sock in (self._listener, *self._connections.values()):
            sock.close()
        self._connections.clear()


class CommandReceiver:
    """Another rank's end.

    Args:
        folder: of the ranks; it may not exist yet.
        timeout: seconds for it to appear.

    Raises:
        RankConnectionError: rank 0 was not there in time.
        ConfigError: the folder is another user's.
    """

    def __init__(self, folder: Path, rank: int, timeout: float = JOIN_SECONDS) -> None:
        self._decoder = FrameDecoder()
        self._commands: deque[dict[str, Any]] = deque()
        end = time.monotonic() + timeout
        while True:
            try:
                self._socket = _connect(folder, rank)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > end:
                    raise RankConnectionError(f"rank 0 did not listen within {timeout:g} s") from None
            time.sleep(_POLL_SECONDS)

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next command; None: rank 0 has ended or told this rank to stop."""
        while True:
            while self._commands:
                command = self._commands.popleft()
                if "ping" not in command:
                    return None if "stop" in command else command
                try:
                    self._socket.sendall(_PONG)
                except (BrokenPipeError, ConnectionResetError):
                    return None
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._commands += self._decoder.feed(data)

    def is_hung_up(self) -> bool:
        """Tell whether rank 0 has ended, or does so within a second."""
        return bool(_find_hung_up({0: self._socket}))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _connect(folder: Path, rank: int) -> socket.socket:
    with open_private_folder(folder) as descriptor:
        token = read_token(descriptor)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(socket_address(descriptor))
            connection.sendall(token + _RANK.pack(rank))
        except OSError:
            connection.close()
            raise
    return connection


def _find_hung_up(connections: Mapping[int, socket.socket]) -> list[int]:
    """Wait for the end of a rank, at most `_HANG_UP_SECONDS`; return the ranks that have ended."""
    ranks = {connection.fileno(): rank for rank, connection in connections.items()}
    poll = select.poll()
    for descriptor in ranks:
        poll.register(descriptor, select.POLLRDHUP)
    return sorted(ranks[descriptor] for descriptor, _ in poll.poll(1000 * _HANG_UP_SECONDS))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or fewer if the connection ends before."""
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except ConnectionResetError:
            break
        if not part:
            break
        data += part
    return data
