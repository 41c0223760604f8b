"""Two hosts on one machine: network namespaces with a cable between them that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


def why_no_hosts() -> str:
    """Why there can be no hosts here; empty where there can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "no ip or unshare on this machine"
    name = f"mega-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not allowed: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        name: its host name, and that of its namespace.
        address: on the cable.
        device: its end of the cable.
    """

    name: str
    address: str
    device: str

    def torchrun(
        self, options: Sequence[str], arguments: Sequence[str], log: Path, **variables: str
    ) -> subprocess.Popen[bytes]:
        """torchrun with these options of mega-train with these arguments; all it says goes to `log`."""
        words = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "mega_train", *arguments]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *words]
        with log.open("wb") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *named],
                stdout=out,
                stderr=out,
                env=os.environ | {"GLOO_SOCKET_IFNAME": self.device, "OMP_NUM_THREADS": "1"} | variables,
                start_new_session=True,
            )

    def pids(self, *, rank: int | None = None) -> list[int]:
        """What runs on it; only the trainer of this rank, if one is given."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        every = [int(pid) for pid in listed.stdout.split()]
        return every if rank is None else [pid for pid in every if f"RANK={rank}" in _variables(pid)]

    def kill(self, *, rank: int | None = None) -> None:
        """End that, at once."""
        for pid in self.pids(rank=rank):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Pull the cable out."""
        _ip("-n", self.name, "link", "set", self.device, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, until the block ends; what still runs on them is ended then."""
    mark = f"{os.getpid():x}"
    hosts = tuple(
        Host(f"mega-{end}-{mark}", f"10.77.0.{i}", f"mg{end}{mark}") for i, end in ((1, "a"), (2, "b"))
    )
    first, second = hosts
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        for host in hosts:
            _etc(host).mkdir(parents=True)
            (_etc(host) / "hosts").write_text(names)  # `ip netns exec` shows it there as /etc/hosts
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        ends = (first.device, "netns", first.name, "type", "veth", "peer", "name", second.device)
        _ip("link", "add", *ends, "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
        yield first, second
    finally:
        for host in hosts:
            shutil.rmtree(_etc(host), ignore_errors=True)
            with suppress(subprocess.CalledProcessError):  # not made yet
                host.kill()
                _ip("netns", "del", host.name)


def _etc(host: Host) -> Path:
    return Path("/etc/netns") / host.name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _variables(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
