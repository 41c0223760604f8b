"""Processes of a model that is split over several ranks of one machine.

They meet in a private folder, and gloo's connections use the loopback device: nothing listens on another
interface. A worker ends with the engine process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_model.distributed.mesh import Mesh, World
from mega_schema.errors import MegaError
from mega_schema.parallel_layout import Layout
from mega_serve.engine.interfaces import RankConnectionError
from mega_serve.execution.rank_sockets import CommandSender
from mega_serve.execution.rendezvous_folder import RendezvousFolder
from mega_serve.process.exit_codes import describe_exit
from mega_serve.process.parent_death import die_with_parent

logger = logging.getLogger("mega.serve.engine")

_STOP_SECONDS = 10.0
_COLLECTIVE_MINUTES = 60.0  # the first one waits until the slowest rank has loaded its weights


class WorkerGroup:
    """The other ranks of the engine process.

    Args:
        options: options of `engine_factory.build_engine`, which every rank reads the model with.
        folder: of the ranks; None: a new one, and the engine starts the other ranks.
    """

    def __init__(self, options: Mapping[str, Any], world: int, folder: Path | None) -> None:
        self._folder = RendezvousFolder.create(folder)
        atexit.register(self.remove_folder)  # if it is not removed before
        self.init_method = self._folder.init_method
        self.commands = CommandSender(self._folder, world)
        self._processes: list[subprocess.Popen[bytes]] = []
        if folder is None:
            settings = json.dumps({**options, "rendezvous": str(self._folder.path)})
            command = [sys.executable, "-P", "-m", "mega_serve.execution.workers"]
            self._processes = [subprocess.Popen([*command, str(rank), settings]) for rank in range(1, world)]
        self.commands.accept_ranks(self._check)
        self.commands.watch(self._end)

    def remove_folder(self) -> None:
        """Remove the folder, once all ranks are connected."""
        self._folder.remove()

    def stop(self) -> None:
        """End the other ranks; kill those of them that this process started and that do not end."""
        self.commands.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            process.wait()
        self.remove_folder()

    def _check(self) -> None:
        """Raise RankConnectionError if a process has ended that has not connected yet."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise RankConnectionError(f"rank {rank}, at its start, {describe_exit(process.returncode)}")

    def _end(self, rank: int) -> None:
        """End this process: a rank has ended, and nothing else interrupts a collective that waits for it."""
        logger.error("rank %d has ended; so does the engine", rank)
        self.remove_folder()
        os._exit(1)


def join_ranks(layout: Layout, rank: int, init_method: str, device: str) -> Mesh:
    """Join the other ranks over the loopback device."""
    for library in ("GLOO", "NCCL"):  # both read it when a group is created
        os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
    return Mesh.join(
        layout,
        World(layout.world, rank, rank),
        device=device,
        init_method=init_method,
        timeout_minutes=_COLLECTIVE_MINUTES,
    )


def main(argv: Sequence[str]) -> int:
    """Run a worker: load its part of the model, and obey rank 0 until it stops or ends."""
    rank, options = int(argv[0]), json.loads(argv[1])
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    from mega_serve.execution.engine_factory import run_worker

    try:
        run_worker(options, rank)
    except (MegaError, RankConnectionError) as error:
        logger.error("rank %d: %s", rank, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
