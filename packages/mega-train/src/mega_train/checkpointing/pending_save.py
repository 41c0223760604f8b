"""One save of a rank: its writer, the writer's state, and the command that ends it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from mega_schema.checkpoint import checkpoint_dir
from mega_schema.checkpoint.async_writer import (
    InProcessWriter,
    SharedBuffer,
    SubprocessWriter,
    WriterHandle,
)
from mega_schema.checkpoint.shard_file import BoxRecord
from mega_schema.checkpoint.writer_process import DISCARD, WriteOrder
from mega_train.checkpointing import state_dict
from mega_train.checkpointing.state_dict import ShardToWrite

# The state of a rank is one integer, of which one all-reduce takes the maximum, so that the most important
# state wins:
#   0            this rank is done
#   1 .. 65535   it failed, with this errno
#   BUSY         it is still writing, without progress since the last poll
#   BUSY + 1     it is still writing, with progress
BUSY = 1 << 16


class PendingSave:
    """One save of a rank, from its start until all ranks know how it ended.

    Attributes:
        command: sent to the writers once all are done: COMMIT or DISCARD; empty before.
        has_progressed: whether the writer had written more at the last `poll` than at the one before.
        start_errno: errno if the save could not start, else 0.
        wait_seconds: seconds spent waiting for the previous save.
        blocked_seconds: seconds until the next step could begin.
    """

    def __init__(self, run: Path, iteration: int, rank: int) -> None:
        self.iteration = iteration
        self.command = ""
        self.has_progressed = False
        self.start_errno = 0
        self.wait_seconds = 0.0
        self.blocked_seconds = 0.0
        self._run = run
        self._rank = rank
        self._writer: WriterHandle | None = None
        self._written_bytes = 0

    @property
    def note(self) -> str:
        """A message for the user about a commit that succeeded."""
        return "" if self._writer is None else self._writer.note

    def start(self, order: WriteOrder, shards: Sequence[ShardToWrite], memory: SharedBuffer | None) -> None:
        """Start to write.

        Args:
            memory: where the order and the values are staged; None writes in this process.
        """
        try:
            self._writer = (
                SubprocessWriter(memory)
                if memory is not None
                else InProcessWriter(order, state_dict.shard_bytes(shards))
            )
        except OSError as error:  # the subprocess cannot start
            self.start_errno = error.errno or errno.EIO

    def poll(self) -> int:
        """Return this rank's state as an integer; see `BUSY`."""
        if self._writer is None:
            self.has_progressed = False
            return self.start_errno
        state = self._writer.state()
        self.has_progressed = self._writer.bytes > self._written_bytes
        self._written_bytes = self._writer.bytes
        return BUSY + self.has_progressed if state is None else state

    def send(self, command: str) -> None:
        """Let rank 0 commit or discard the files of all ranks; the other ranks are done."""
        self.command = command
        if self._writer is not None and self._rank == 0:
            self._writer.send(command)
        elif self._rank == 0 and command == DISCARD:
            checkpoint_dir.discard(self._run, self.iteration)
            self.start_errno = 0
        else:
            self.close()

    def close(self) -> None:
        """Release the writer."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self.start_errno = 0


def stage(memory: SharedBuffer, order: WriteOrder, shards: Sequence[ShardToWrite]) -> None:
    """Copy the values and the order, with their offsets, to shared memory.

    Raises:
        OSError: the memory is not available.
    """
    end = 0
    planned = dict[str, Sequence[BoxRecord]]()
    for namespace, boxes in order["spaces"].items():
        planned[namespace], end = memory.plan(boxes, end)
    offsets = [box["buffer_offset"] for boxes in planned.values() for box in boxes]
    staged_order: WriteOrder = {**order, "spaces": planned}
    state_dict.copy_to_buffer(shards, offsets, memory.stage(staged_order, end))
