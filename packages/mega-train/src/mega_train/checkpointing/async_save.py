"""Save checkpoints asynchronously, and agree over all ranks on the outcome of each save.

A rank's values are copied to shared memory at the end of a step; a subprocess writes and checksums them
(`mega_schema.checkpoint.async_writer`). After every step the ranks all-reduce the maximum of their states:
busy, done or failed. Once all are done, rank 0's subprocess commits. A save that fails on any rank leaves the
previous checkpoint, and the run continues.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint import checkpoint_dir
from mega_schema.checkpoint.async_writer import SharedBuffer, describe_failure
from mega_schema.checkpoint.writer_process import COMMIT, DISCARD, CommitContents, CommitOrder, WriteOrder
from mega_train.checkpointing import state_dict
from mega_train.checkpointing.pending_save import BUSY, PendingSave, stage
from mega_train.checkpointing.state_dict import ShardToWrite
from mega_train.config import CheckpointConfig
from mega_train.telemetry.events import CheckpointSaved

log = logging.getLogger("mega.train")

_POLL_SECONDS = 0.02  # between two polls while nothing else is left to do


class CheckpointSaver:
    """Writer of a run's checkpoints, one at a time. All ranks call each method after the same step.

    Attributes:
        saved_at: the iteration of the newest checkpoint in --save, as far as this run knows.
        heartbeat: changes while any rank writes a checkpoint; the watchdog reads it as progress.
        finished: finished saves that the train loop has not reported yet.
        last_error: the reason why the newest finished save failed; empty if it succeeded.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        mesh: Mesh,
        saved_at: int | None = None,
        superseded: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build the saver of a run's checkpoints.

        Args:
            superseded: iterations in --save whose checkpoints the first save supersedes.
        """
        self._config = config
        self._mesh = mesh
        self._clock = clock
        self._memory = SharedBuffer() if config.async_save else None
        self._pending: PendingSave | None = None
        self._start_time = 0.0  # of the pending save
        self._superseded = list(superseded)
        self._saved_iterations = set[int]()
        self.saved_at = saved_at
        self.heartbeat = 0
        self.last_error = ""
        self.finished: list[CheckpointSaved] = []

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None

    @property
    def resume_hint(self) -> str:
        """The flags that resume the run, or the reason why nothing was saved, for a message."""
        if self.saved_at is not None:
            return f"resume with --load {self._config.save} (iteration {self.saved_at})"
        if self._config.interval is not None:
            return f"nothing was saved yet: --save-interval is {self._config.interval}"
        flags = "--save RUN --save-interval N" if self._config.save is None else "--save-interval N"
        return f"nothing was saved: {flags} saves every N iterations"

    def begin(self, iteration: int, shards: Sequence[ShardToWrite], commit: CommitContents) -> None:
        """Start to save the current values. Waits for the previous save if it is still running.

        Args:
            shards: the shards that this rank writes.
            commit: the contents of the manifest and of the other files.
        """
        start_time = self._clock()
        self.finish()
        assert self._config.save is not None
        save = PendingSave(self._config.save, iteration, self._mesh.rank)
        save.wait_seconds = self._clock() - start_time
        self._pending = save
        self._start_time = start_time
        commit_order: CommitOrder = {
            **commit,
            "replace": iteration in self._saved_iterations or iteration in self._superseded,
            "superseded": self._superseded,
        }
        order: WriteOrder = {
            "run": str(self._config.save),
            "iteration": iteration,
            "rank": self._mesh.rank,
            "spaces": state_dict.namespace_boxes(shards),
            "commit": commit_order if self._mesh.rank == 0 else None,
        }
        self._saved_iterations.add(iteration)
        error_number = 0
        try:
            if self._mesh.rank == 0:
                checkpoint_dir.begin(self._config.save, iteration)
            if self._memory is not None:
                stage(self._memory, order, shards)
        except OSError as error:
            error_number = error.errno or errno.EIO
        # no rank writes before rank 0 has created the folder
        if self._mesh.all_reduce_max(error_number):
            save.start_errno = error_number
        else:
            save.start(order, shards, self._memory)
        save.blocked_seconds = self._clock() - start_time
        if self._memory is None:
            self.finish()

    def poll(self) -> None:
        """Check the state of the current save, if there is one; commit it once all ranks are done."""
        save = self._pending
        if save is None:
            return
        own_state = save.poll()
        self.heartbeat += save.has_progressed
        max_state = self._mesh.all_reduce_max(own_state)
        if max_state >= BUSY:
            self.heartbeat += max_state - BUSY
        elif save.command:
            self._complete(save, max_state, own_state)
        elif max_state:
            self.last_error = _describe_error(self._mesh, max_state, own_state)
            save.send(DISCARD)
        else:
            save.send(COMMIT)

    def finish(self) -> None:
        """Wait until no save is running."""
        while self._pending is not None:
            self.poll()
            if self._memory is not None:
                time.sleep(_POLL_SECONDS)

    def _complete(self, save: PendingSave, max_state: int, own_state: int) -> None:
        if save.command == COMMIT:
            self.last_error = _describe_error(self._mesh, max_state, own_state) if max_state else ""
        note = save.note
        save.close()
        self._pending = None
        if not self.last_error:
            self.saved_at = save.iteration
            self._superseded = []
        if self._mesh.rank == 0 and self.last_error:
            what = f"{self._config.save}: no checkpoint of iteration {save.iteration}: {self.last_error}"
            newest = f"newest checkpoint: iteration {self.saved_at}"
            if self.saved_at is None:
                newest = "no checkpoint yet"
            log.warning("%s; training continues; %s", what, newest)
        if note:
            log.warning("%s: an earlier checkpoint cannot be removed: %s", self._config.save, note)
        write_seconds = self._clock() - self._start_time
        self.finished.append(
            CheckpointSaved(
                iteration=save.iteration,
                blocked_seconds=write_seconds if self._memory is None else save.blocked_seconds,
                wait_seconds=save.wait_seconds,
                write_seconds=write_seconds,
                error=self.last_error,
            )
        )


def _describe_error(mesh: Mesh, max_state: int, own_state: int) -> str:
    """Describe a failed save and name one rank on which it failed; every rank must call it."""
    rank = mesh.all_reduce_max(mesh.rank if own_state == max_state else -1)
    return describe_failure(max_state) + (f", on rank {rank}" if mesh.layout.world > 1 else "")
