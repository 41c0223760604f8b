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
from typing import Any

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint import checkpoint_dir
from mega_schema.checkpoint.async_writer import (
    InProcessWriter,
    SharedBuffer,
    SubprocessWriter,
    WriterHandle,
    describe_failure,
)
from mega_schema.checkpoint.writer_process import COMMIT, DISCARD, Order
from mega_train.checkpointing import state_dict
from mega_train.checkpointing.state_dict import ShardToWrite
from mega_train.config import CheckpointConfig
from mega_train.telemetry.events import CheckpointSaved

log = logging.getLogger("mega.train")

# One integer per rank, of which one all-reduce takes the maximum, so that the most important state wins:
#   0            this rank is done
#   1 .. 65535   it failed, with this errno
#   _BUSY        it is still writing, without progress since the last poll
#   _BUSY + 1    it is still writing, with progress
_BUSY = 1 << 16
_POLL_SECONDS = 0.02  # between two polls while nothing else is left to do


class CheckpointSaver:
    """Writer of a run's checkpoints, one at a time. All ranks call each method after the same step.

    Attributes:
        saved_at: the iteration of the newest checkpoint in --save, as far as this run knows.
        heartbeat: changes while any rank writes a checkpoint; the watchdog reads it as progress.
        finished: finished saves, which the train loop reports and removes.
        last_error: why the newest finished save failed; empty where it succeeded.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        mesh: Mesh,
        saved_at: int | None = None,
        superseded: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            superseded: iterations in --save whose checkpoints the first save supersedes.
        """
        self._superseded = list(superseded)
        self._saved_iterations = set[int]()
        self._config = config
        self._mesh = mesh
        self._clock = clock
        self._memory = SharedBuffer() if config.background else None
        self.saved_at = saved_at
        self.heartbeat = 0
        self.last_error = ""
        self.finished: list[CheckpointSaved] = []
        self.iteration: int | None = None  # of the current save
        self._writer: WriterHandle | None = None
        self._start_errno = 0  # errno of a save that could not start
        self._command = ""
        self._written_bytes = 0
        self._start_time = self._wait_seconds = self._blocked_seconds = 0.0

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.iteration is not None

    def begin(self, iteration: int, shards: Sequence[ShardToWrite], commit: dict[str, Any]) -> None:
        """Start to save the current values. A save that is still running is waited for.

        Args:
            shards: the shards that this rank writes.
            commit: the contents of the manifest and of the other files, as in a write order.
        """
        start_time = self._clock()
        self.finish()
        self._wait_seconds = self._clock() - start_time
        assert self._config.save is not None
        self.iteration = iteration
        self._start_time = start_time
        self._command = ""
        self._written_bytes = 0
        self._start_errno = 0
        order = {
            "run": str(self._config.save),
            "iteration": iteration,
            "rank": self._mesh.rank,
            "spaces": state_dict.write_order(shards),
            "commit": commit | self._replace_rules(iteration) if self._mesh.rank == 0 else None,
        }
        self._saved_iterations.add(iteration)
        error_number = 0
        try:
            if self._mesh.rank == 0:
                checkpoint_dir.begin(self._config.save, iteration)
            if self._memory is not None:
                order = self._stage(self._memory, order, shards)
        except OSError as error:
            error_number = error.errno or errno.EIO
        # no rank writes before rank 0 has created the folder
        if self._mesh.all_reduce_max(error_number):
            self._start_errno = error_number
        else:
            self._start(order, shards)
        self._blocked_seconds = self._clock() - start_time
        if self._memory is None:
            self.finish()

    def _replace_rules(self, iteration: int) -> dict[str, Any]:
        """Return which checkpoints the commit may replace or supersede, as in a write order."""
        replaces = iteration in self._saved_iterations or iteration in self._superseded
        return {"replace": replaces, "superseded": self._superseded}

    def poll(self) -> None:
        """Check the state of the current save, if there is one; commit it once all ranks are done."""
        if self.iteration is None:
            return
        own_state = self._state()
        max_state = self._mesh.all_reduce_max(own_state)
        if max_state >= _BUSY:
            self.heartbeat += max_state - _BUSY
        elif self._command:
            self._complete(max_state, own_state)
        elif max_state:
            self.last_error = self._describe_error(max_state, own_state)
            self._send(DISCARD)
        else:
            self._send(COMMIT)

    def finish(self) -> None:
        """Wait until no save is running."""
        while self.iteration is not None:
            self.poll()
            if self._memory is not None:
                time.sleep(_POLL_SECONDS)

    def _stage(
        self, memory: SharedBuffer, order: dict[str, Any], shards: Sequence[ShardToWrite]
    ) -> dict[str, Any]:
        end = 0
        placed = {}
        for namespace, boxes in order["spaces"].items():
            placed[namespace], end = memory.plan(boxes, end)
        order = order | {"spaces": placed}
        offsets = [box["at"] for boxes in placed.values() for box in boxes]
        state_dict.copy_to_buffer(shards, offsets, memory.stage(order, end))
        return order

    def _start(self, order: Order, shards: Sequence[ShardToWrite]) -> None:
        try:
            self._writer = (
                SubprocessWriter(self._memory)
                if self._memory
                else InProcessWriter(order, state_dict.shard_bytes(shards))
            )
        except OSError as error:  # the subprocess cannot start
            self._start_errno = error.errno or errno.EIO

    def _state(self) -> int:
        """Return this rank's state as an integer; see `_BUSY`."""
        if self._writer is None:
            return self._start_errno
        state = self._writer.state()
        has_progressed, self._written_bytes = self._writer.bytes > self._written_bytes, self._writer.bytes
        self.heartbeat += has_progressed
        return _BUSY + has_progressed if state is None else state

    def _send(self, command: str) -> None:
        self._command = command
        if self._writer is not None and self._mesh.rank == 0:
            self._writer.send(command)
        elif self._mesh.rank == 0 and command == DISCARD:
            assert self._config.save is not None
            assert self.iteration is not None
            checkpoint_dir.discard(self._config.save, self.iteration)
            self._start_errno = 0
        else:
            self._close_writer()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._start_errno = 0

    def _complete(self, max_state: int, own_state: int) -> None:
        assert self.iteration is not None
        iteration = self.iteration
        note = self._writer.note if self._writer is not None else ""
        if self._command == COMMIT:
            self.last_error = self._describe_error(max_state, own_state) if max_state else ""
        self._close_writer()
        self.iteration = None
        if not self.last_error:
            self.saved_at = iteration
            self._superseded = []
        if self._mesh.rank == 0 and self.last_error:
            log.warning("%s", self._warning(iteration))
        if note:
            log.warning("%s: an earlier checkpoint cannot be removed: %s", self._config.save, note)
        write_seconds = self._clock() - self._start_time
        self.finished.append(
            CheckpointSaved(
                iteration=iteration,
                blocked_seconds=write_seconds if self._memory is None else self._blocked_seconds,
                wait_seconds=self._wait_seconds,
                write_seconds=write_seconds,
                error=self.last_error,
            )
        )

    def _describe_error(self, max_state: int, own_state: int) -> str:
        rank = self._mesh.all_reduce_max(self._mesh.rank if own_state == max_state else -1)
        return describe_failure(max_state) + (f", on rank {rank}" if self._mesh.layout.world > 1 else "")

    def _warning(self, iteration: int) -> str:
        newest = (
            "no checkpoint yet" if self.saved_at is None else f"newest checkpoint: iteration {self.saved_at}"
        )
        return (
            f"{self._config.save}: no checkpoint of iteration {iteration}: {self.last_error}; "
            f"training continues; {newest}"
        )
