"""Commands between ranks: the token, the folder's mode, and ranks that end or hang."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mega_schema.errors import ConfigError
from mega_serve.engine.interfaces import Chunk, RankConnectionError
from mega_serve.execution import rank_sockets
from mega_serve.execution.rank_sockets import PING_SECONDS, CommandReceiver, CommandSender
from mega_serve.execution.rendezvous_folder import TOKEN_BYTES, RendezvousFolder

RANKS = 3


class Clock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Ranks:
    """The ends of the connections between ranks; a test's end closes them.

    Attributes:
        pool: threads for the other ranks.
    """

    def __init__(self, folder: RendezvousFolder, pool: ThreadPoolExecutor, stack: ExitStack) -> None:
        self.folder = folder
        self.pool = pool
        self._stack = stack

    def listen(self, clock: Callable[[], float] = time.monotonic) -> CommandSender:
        return self._stack.enter_context(closing(CommandSender(self.folder, RANKS, clock)))

    def connect(self, rank: int) -> CommandReceiver:
        receiver = self.pool.submit(CommandReceiver, self.folder.path, rank).result()
        return self._stack.enter_context(closing(receiver))

    def connect_all(
        self, clock: Callable[[], float] = time.monotonic
    ) -> tuple[CommandSender, list[CommandReceiver]]:
        sender = self.listen(clock)
        receivers = [self.connect(rank) for rank in range(1, RANKS)]
        sender.accept_ranks(do_nothing)
        return sender, receivers


@pytest.fixture
def folder(tmp_path: Path) -> RendezvousFolder:
    # longer than the address of a Unix socket may be
    return RendezvousFolder.create(tmp_path / ("ranks" * 30))


@pytest.fixture
def ranks(folder: RendezvousFolder) -> Iterator[Ranks]:
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        yield Ranks(folder, pool, stack)


def do_nothing() -> None:
    """Check nothing while ranks connect."""


def send_greeting(folder: RendezvousFolder, greeting: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.path)
        connection.connect("commands")
    connection.sendall(greeting)
    return connection


def test_only_this_user_can_enter_the_folder_and_read_its_token(folder: RendezvousFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "token").stat().st_mode) == 0o600
    assert len(folder.token) == TOKEN_BYTES
    second = RendezvousFolder.create()
    assert stat.S_IMODE(second.path.stat().st_mode) == 0o700
    assert second.token != folder.token
    second.remove()
    assert not second.path.exists()


def test_a_folder_that_exists_before_is_not_used(tmp_path: Path) -> None:
    message = "exists already: wanted a new folder; hint: TMPDIR=DIR of your own"
    with pytest.raises(ConfigError, match=message):
        RendezvousFolder.create(tmp_path)


def test_a_folder_that_others_may_enter_or_own_is_refused(
    folder: RendezvousFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.chmod(0o750)
    with pytest.raises(ConfigError, match=r"is not private: found mode 750 of user \d+, wanted mode 700"):
        CommandReceiver(folder.path, 1)
    folder.path.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"mode 700 of user {user}, wanted mode 700 of user {user + 1}"):
        CommandReceiver(folder.path, 1)


def test_every_rank_gets_every_command_in_order_and_then_the_end(ranks: Ranks) -> None:
    sender, receivers = ranks.connect_all()

    def read_all(receiver: CommandReceiver) -> list[dict[str, Any] | None]:
        return [receiver.receive() for _ in range(3)]

    readers = [ranks.pool.submit(read_all, receiver) for receiver in receivers]
    sender.send({"run": [Chunk(token_ids=[5], start=0, pages=range(2), logits_from=0)]})
    sender.send({"copy_pages": [(1, 2)] * 100_000})  # more than the buffers of a socket hold
    sender.close()
    for reader in readers:
        first, second, last = reader.result(timeout=10)
        assert first is not None
        assert Chunk(**first["run"][0]).pages == [0, 1]
        assert second == {"copy_pages": [[1, 2]] * 100_000}
        assert last is None


@pytest.mark.parametrize("case", ["another token", "no token", "silence", "rank 0", "rank 3", "rank 1 again"])
def test_a_connection_without_the_token_or_of_another_rank_is_closed(
    ranks: Ranks, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sockets, "_HANDSHAKE_SECONDS", 0.2)
    sender = ranks.listen()
    accepting: Future[None] = ranks.pool.submit(sender.accept_ranks, do_nothing)
    first = ranks.connect(1)
    greeting = {
        "another token": bytes(TOKEN_BYTES) + b"\0\0\0\2",
        "no token": b"\0\0\0\2" * 9,
        "silence": b"",
        "rank 0": ranks.folder.token + b"\0\0\0\0",
        "rank 3": ranks.folder.token + b"\0\0\0\3",
        "rank 1 again": ranks.folder.token + b"\0\0\0\1",
    }[case]
    with send_greeting(ranks.folder, greeting) as stranger:
        assert stranger.recv(1) == b""
    assert not accepting.done()
    second = ranks.connect(2)
    accepting.result()
    sender.send({"copy_pages": []})
    assert first.receive() == second.receive() == {"copy_pages": []}


def test_tokens_are_compared_in_constant_time(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    ranks.connect_all()
    assert compared == [(ranks.folder.token, ranks.folder.token)] * (RANKS - 1)


def test_ranks_that_do_not_come_are_named(ranks: Ranks) -> None:
    sender = ranks.listen()
    ranks.connect(1)
    with pytest.raises(RankConnectionError, match=r"ranks \[2\] did not connect within 0\.3 s"):
        sender.accept_ranks(do_nothing, timeout=0.3)
    with pytest.raises(RankConnectionError, match=r"rank 0 did not listen within 0 s"):
        CommandReceiver(ranks.folder.path.with_name("nowhere"), 1, timeout=0)


def test_a_check_that_fails_ends_the_wait(ranks: Ranks) -> None:
    def check() -> None:
        raise RankConnectionError("rank 1 exited with code 3 at its start")

    with pytest.raises(RankConnectionError, match="code 3"):
        ranks.listen().accept_ranks(check)


def test_a_rank_that_ends_is_seen_at_once_by_an_idle_rank_0(ranks: Ranks) -> None:
    sender, receivers = ranks.connect_all()
    lost: Future[int] = Future()
    sender.watch(lost.set_result)
    receivers[1].close()
    assert lost.result(timeout=10) == 2
    with pytest.raises(RankConnectionError, match="rank 2 has ended"):
        sender.send({"copy_pages": []})


def test_the_error_of_a_collective_names_the_rank_that_ended(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sockets, "_HANG_UP_SECONDS", 0.1)
    sender, receivers = ranks.connect_all()
    with pytest.raises(RuntimeError, match="shapes differ"), sender.name_lost_rank():
        raise RuntimeError("shapes differ")  # a defect of ours keeps its traceback
    assert not receivers[0].is_hung_up()
    receivers[1].close()
    with pytest.raises(RankConnectionError, match="rank 2 has ended"), sender.name_lost_rank():
        raise RuntimeError("Connection closed by peer")
    sender.close()
    assert receivers[0].is_hung_up()


def test_ranks_that_were_told_to_stop_are_not_lost(ranks: Ranks) -> None:
    sender, receivers = ranks.connect_all()
    lost: list[int] = []
    sender.watch(lost.append)
    (watcher,) = [thread for thread in threading.enumerate() if thread.name == "ranks"]
    sender.close()
    for receiver in receivers:
        assert receiver.receive() is None
        receiver.close()
    watcher.join(10)
    assert lost == []


def test_a_ping_waits_for_every_rank_and_is_rare(ranks: Ranks) -> None:
    clock = Clock()
    sender, receivers = ranks.connect_all(clock)
    sender.ping()  # a command was sent lately: returns though nobody answers
    clock.seconds = PING_SECONDS
    ping = ranks.pool.submit(sender.ping)
    answers = [ranks.pool.submit(receivers[0].receive)]
    with pytest.raises(TimeoutError):
        ping.result(timeout=0.3)  # rank 2 hangs
    answers.append(ranks.pool.submit(receivers[1].receive))
    ping.result(timeout=10)
    sender.close()
    assert [reply.result(timeout=10) for reply in answers] == [None, None]


def test_a_ping_names_the_rank_that_ended(ranks: Ranks) -> None:
    clock = Clock()
    sender, receivers = ranks.connect_all(clock)
    receivers[0].close()
    clock.seconds = PING_SECONDS
    ranks.pool.submit(receivers[1].receive)
    with pytest.raises(RankConnectionError, match="rank 1 has ended"):
        sender.ping()
    sender.close()


def test_the_end_of_rank_0_ends_the_other_ranks(ranks: Ranks) -> None:
    sender, receivers = ranks.connect_all()
    sender.close()
    assert [receiver.receive() for receiver in receivers] == [None, None]
