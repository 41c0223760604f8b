"""Serving under torchrun: rank 0 is the server, the other processes become workers of its engine."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mega_schema.errors import ConfigError
from mega_serve.process.parent_death import die_with_parent

_RUN_ID = "TORCHELASTIC_RUN_ID"  # which torchrun always sets
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_START_FIELD = 19  # of /proc/PID/stat after the name: the start of the process in clock ticks; see proc(5)


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """This process, as torchrun describes it.

    Attributes:
        world: number of processes.
        folder: where the ranks meet; rank 0 creates it.
    """

    rank: int
    world: int
    folder: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], agent: int) -> TorchrunRank | None:
        """Read torchrun's variables; None without torchrun.

        Args:
            agent: process id of torchrun, the parent of all ranks.

        Raises:
            ConfigError: a variable is no number, or the ranks are on several hosts.
        """
        if _RUN_ID not in environment:
            return None
        world = _read_number(environment, "WORLD_SIZE")
        local = _read_number(environment, "LOCAL_WORLD_SIZE")
        if world != local:
            what = "ranks on several hosts cannot serve one model"
            hint = f"torchrun --nnodes 1 --nproc-per-node {local}"
            raise ConfigError("WORLD_SIZE", what, found=world, wanted=local, hint=hint)
        # no other torchrun has these two numbers, and no other attempt of this one has the third
        name = f"mega-serve-{agent}-{_start_of(agent)}-{_read_number(environment, _RESTARTS)}"
        return cls(_read_number(environment, "RANK"), world, Path(tempfile.gettempdir()) / name)

    def become_worker(self, options: Mapping[str, Any]) -> NoReturn:
        """Replace this process by a worker of rank 0's engine; it keeps its id, which torchrun watches.

        Args:
            options: of the engine.
        """
        settings = json.dumps({**options, "rendezvous": str(self.folder)})
        command = [sys.executable, "-P", "-m", "mega_serve.execution.workers", str(self.rank), settings]
        sys.stdout.flush()
        os.execv(sys.executable, command)  # without a shell

    def check_world(self, tp: int, pp: int) -> None:
        """Refuse a number of processes that is not that of the layout.

        If the numbers differ, rank 0 alone raises: there is one message.

        Raises:
            ConfigError: the numbers differ.
        """
        if self.world == tp * pp:
            return
        self.leave_report_to_rank_0()
        raise ConfigError(
            "--tp, --pp",
            "need as many processes as torchrun starts",
            found=f"{tp} x {pp} for {self.world} processes",
            wanted=f"{self.world}",
            hint=f"torchrun --nproc-per-node {tp * pp}",
        )

    def leave_report_to_rank_0(self) -> None:
        """Return on rank 0. Another rank waits until torchrun ends it, as one rank has failed."""
        if self.rank == 0:
            return
        die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            signal.pause()


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        hint = f"unset {_RUN_ID}, or start with torchrun"
        raise ConfigError(
            name, "not a number", found=repr(text), wanted="an integer set by torchrun", hint=hint
        )
    return int(text)


def _start_of(process: int) -> str:
    """Return when a process started."""
    text = Path(f"/proc/{process}/stat").read_text("utf-8", errors="replace")
    return text.rpartition(")")[2].split()[_START_FIELD]
