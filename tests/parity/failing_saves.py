"""Checkpoints that one of several ranks cannot write."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mega_ckpt.checkpoint.verify import verify
from mega_model.distributed.mesh import World
from mega_schema.checkpoint.async_writer import SubprocessWriter
from mega_schema.checkpoint.checkpoint_dir import iterations
from mega_schema.checkpoint.reader import Checkpoint
from tests.parity.runs import steps, trainer


def one_rank_cannot_write(world: World, meet: str, folder: Path) -> None:
    """Whatever befalls the last rank's writer, none commits, all say so, and the next save is whole."""
    save = folder / "run"
    run = trainer("gpt", world, meet, folder, checkpoint__save=str(save), parallel__zero_stage=1)
    last = world.rank == world.size - 1
    start = SubprocessWriter.__init__

    def start_and_kill(writing: SubprocessWriter, *arguments: object) -> None:
        start(writing, *arguments)  # type: ignore[arg-type]
        os.kill(writing._process.pid, signal.SIGKILL)

    def refuse_fork(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    causes = ["the writer process was killed by SIGKILL", "Resource temporarily unavailable", ""]
    for fault, cause in zip((start_and_kill, refuse_fork, start), causes, strict=True):
        if last:
            SubprocessWriter.__init__ = fault  # type: ignore[assignment,method-assign]
        steps(run, 1)
        run.save()
        while run.saver.is_saving:
            steps(run, 1)
            run.saver.poll()
        run.mesh.barrier()
        ended = run.saver.finished.pop()
        assert not run.saver.finished
        assert ended.error == (f"{cause}, on rank {world.size - 1}" if cause else "")
        assert iterations(save) == ([] if cause else [ended.iteration])
        assert not list(save.glob(".*"))
    verify(Checkpoint.open(save))
    assert run.saver.saved_at == ended.iteration
    run.mesh.destroy()
