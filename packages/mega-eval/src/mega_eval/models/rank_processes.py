"""The processes of a model over several ranks: started here, or by torchrun.

Processes that are started here meet in a private folder, and gloo's connections use the loopback device. A
worker ends with its parent: it reads a pipe whose other end the parent holds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

from mega_eval.models.rank_setup import RankSettings, open_engine
from mega_model.distributed.mesh import World
from mega_schema.errors import MegaError

_GRACE_SECONDS = 10.0  # between the error of a collective and the end of the process that caused it
_POLL_SECONDS = 0.1
_MISTAKE = 2


class LostRankError(MegaError):
    """A process of the model has ended."""


class RankProcesses:
    """The other ranks of this process, which is rank 0.

    Args:
        world: number of ranks.
        settings: of every rank.
    """

    def __init__(self, world: int, settings: RankSettings) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # read when a group is created
        self._folder = Path(tempfile.mkdtemp(prefix="mega-eval-"))  # of mode 0700
        self.init_method = f"file://{self._folder / 'rendezvous'}"
        self._is_closing = False
        self._lost = threading.Event()
        self._reported = threading.Event()
        self._message = ""
        words = [sys.executable, "-P", "-m", "mega_eval.models.rank_processes"]
        content = json.dumps({**asdict(settings), "world": world, "init_method": self.init_method})
        self._processes = [
            subprocess.Popen([*words, str(rank), content], stdin=subprocess.PIPE, process_group=0)
            for rank in range(1, world)
        ]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        """Wait for the end of a rank. If the main thread is in a call that does not end, end this process."""
        while not self._is_closing and not self._lost.is_set():
            time.sleep(_POLL_SECONDS)
            for rank, process in enumerate(self._processes, 1):
                code = process.poll()
                if code is not None and not self._is_closing:
                    end = f"got signal {-code}" if code < 0 else f"exited with code {code}"
                    self._message = f"rank {rank} {end}"
                    self._lost.set()
        if self._lost.is_set() and not self._reported.wait(_GRACE_SECONDS) and not self._is_closing:
            click.echo(f"error: {self._build_error()}", err=True)
            self.close()
            os._exit(_MISTAKE)

    def explain(self, error: RuntimeError) -> Exception:
        """Return the name of the rank that has ended; the error itself if all run."""
        if not self._lost.wait(_GRACE_SECONDS):
            return error
        self._reported.set()
        return self._build_error()

    def _build_error(self) -> LostRankError:
        hint = "read its last lines above, and repeat the command to resume"
        return LostRankError("--tp, --pp, --dp", self._message, hint=hint)

    def close(self) -> None:
        """Kill the other ranks: they hold nothing that is not here."""
        self._is_closing = True
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class TorchrunProcesses:
    """The other ranks, which torchrun watches."""

    def explain(self, error: RuntimeError) -> Exception:
        """Say that a rank has ended; torchrun says which."""
        first = str(error).partition("\n")[0]
        hint = "read torchrun's report, and repeat the command to resume"
        return LostRankError("--tp, --pp, --dp", "a rank has ended", found=first, hint=hint)

    def close(self) -> None:
        """Do nothing: torchrun ends them."""


def run_worker(world: World, settings: RankSettings, init_method: str) -> None:
    """Be another rank than 0: load a part of the model, and obey rank 0 until it stops or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles the terminal's
    engine = open_engine(world, settings, init_method)
    try:
        engine.obey()
        engine.mesh.barrier()
    except RuntimeError as error:
        raise LostRankError(f"rank {world.rank}", "another rank has ended") from error
    engine.mesh.destroy()


def _end_with_parent() -> None:
    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main(argv: Sequence[str]) -> NoReturn:
    """Run a worker that `RankProcesses` started."""
    _end_with_parent()
    rank, values = int(argv[0]), json.loads(argv[1])
    world = World(values.pop("world"), rank, rank)
    init_method = values.pop("init_method")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        run_worker(world, RankSettings(**values), init_method)
    except LostRankError:
        sys.exit(1)  # rank 0 reports it
    except MegaError as error:
        click.echo(f"rank {rank}: {error}", err=True)
        sys.exit(_MISTAKE)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
