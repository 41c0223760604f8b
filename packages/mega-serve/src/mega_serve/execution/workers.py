"""Processes of a model that is split over several ranks, started by the engine process on its own machine.

They meet in a file of a private folder, and gloo's connections use the loopback device: nothing listens on
another interface. A worker ends with the engine process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_model.distributed.mesh import Mesh, World
from mega_schema.parallel_layout import Layout
from mega_serve.process.parent_death import die_with_parent

_STOP_SECONDS = 10.0
# ranks wait for a command as long as the server is idle; a closed connection reveals a dead peer
IDLE_MINUTES = 60.0 * 24 * 365


class WorkerGroup:
    """The other ranks of the engine process.

    Args:
        options: options of `engine_factory.build_engine`, which every rank reads the model with.
    """

    def __init__(self, options: Mapping[str, Any], world: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mega-serve-")  # of mode 0700
        self.init_method = f"file://{Path(self._folder.name) / 'rendezvous'}"
        settings = {**options, "init_method": self.init_method}
        command = [sys.executable, "-P", "-m", "mega_serve.execution.workers"]
        self._processes = [
            subprocess.Popen([*command, str(rank), json.dumps(settings)]) for rank in range(1, world)
        ]

    def stop(self) -> None:
        """Wait for the workers, which rank 0 has told to stop; kill those that do not."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            process.wait()
        self._folder.cleanup()


def join_ranks(layout: Layout, rank: int, init_method: str, device: str) -> Mesh:
    """Join the other ranks over the loopback device."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # torch reads it when it creates a group
    return Mesh.join(
        layout,
        World(layout.world, rank, rank),
        device=device,
        init_method=init_method,
        timeout_minutes=IDLE_MINUTES,
    )


def main(argv: Sequence[str]) -> int:
    """Run a worker: load its part of the model, and obey rank 0."""
    rank, options = int(argv[0]), json.loads(argv[1])
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from mega_serve.execution.engine_factory import run_worker

    try:
        run_worker(options, rank)
    except RuntimeError as error:  # gloo has no class for it
        if "closed by peer" not in str(error) and "reset by peer" not in str(error):
            raise
        return 1  # another rank ended; the engine process says why
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
