"""The checkpoints a run writes while it goes on, and that its ranks agree on each.

A rank's values are copied to memory at the end of a step; a process of its own writes and checksums them
(`mega_schema.checkpoint.async_writer`). After every step the ranks compare a number each: is mine still
writing, done, or failed? Once all are done the first rank's process commits. A save that fails on any rank
leaves the checkpoint before it, and the run goes on.
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
from mega_train.checkpointing.state_dict import Part
from mega_train.config import Save
from mega_train.telemetry.events import Saved

log = logging.getLogger("mega.train")

_BUSY = 1 << 16  # past every state; and 1 more where a rank has got on since the last time
_LOOK = 0.02  # seconds between two looks where nothing else is left to do


class Saves:
    """One rank's part in a run's checkpoints, one at a time. All ranks call each method after the same step.

    Attributes:
        saved_at: the iteration of the newest checkpoint in --save, as far as this run knows.
        beat: changes while a checkpoint is being written on any rank: a sign of life.
        ended: what became of saves, for who shows and records it to take away.
        problem: of the newest save that ended.
    """

    def __init__(
        self,
        said: Save,
        mesh: Mesh,
        saved_at: int | None = None,
        superseded: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            superseded: iterations in --save whose checkpoints the first save supersedes.
        """
        self._superseded, self._written = list(superseded), set[int]()
        self._said, self._mesh, self._clock = said, mesh, clock
        self._memory = SharedBuffer() if said.background else None
        self.saved_at, self.beat, self.problem = saved_at, 0, ""
        self.ended: list[Saved] = []
        self.iteration: int | None = None  # of the one being written
        self._writing: WriterHandle | None = None
        self._broken = 0  # the state of one that could not even begin
        self._told = ""
        self._bytes = 0
        self._began = self._waited = self._stalled = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.iteration is not None

    def begin(self, iteration: int, parts: Sequence[Part], commit: dict[str, Any]) -> None:
        """Take the values as they are now. One that is still being written is waited for.

        Args:
            parts: what this rank writes.
            commit: what the manifest and the other files say, as an order to write has it.
        """
        began = self._clock()
        self.finish()
        self._waited = self._clock() - began
        assert self._said.save is not None
        self.iteration, self._began, self._told, self._bytes, self._broken = iteration, began, "", 0, 0
        order = {
            "run": str(self._said.save),
            "iteration": iteration,
            "rank": self._mesh.rank,
            "spaces": state_dict.spaces(parts),
            "commit": commit | self._permission(iteration) if self._mesh.rank == 0 else None,
        }
        self._written.add(iteration)
        state = 0
        try:
            if self._mesh.rank == 0:
                checkpoint_dir.begin(self._said.save, iteration)
            if self._memory is not None:
                order = self._staged(self._memory, order, parts)
        except OSError as error:
            state = error.errno or errno.EIO
        # no rank writes before the first has made room
        if self._mesh.all_reduce_max(state):
            self._broken = state
        else:
            self._start(order, parts)
        self._stalled = self._clock() - began
        if self._memory is None:
            self.finish()

    def _permission(self, iteration: int) -> dict[str, Any]:
        """Which checkpoints the commit may replace or supersede, as an order to write has it."""
        replaces = iteration in self._written or iteration in self._superseded
        return {"replace": replaces, "superseded": self._superseded}

    def advance(self) -> None:
        """See how far the checkpoint being written is, if there is one; commit it once all ranks are done."""
        if self.iteration is None:
            return
        mine = self._state()
        of_all = self._mesh.all_reduce_max(mine)
        if of_all >= _BUSY:
            self.beat += of_all - _BUSY
        elif self._told:
            self._end(of_all, mine)
        elif of_all:
            self.problem = self._cause(of_all, mine)
            self._tell(DISCARD)
        else:
            self._tell(COMMIT)

    def finish(self) -> None:
        """Wait until nothing is being written any more."""
        while self.iteration is not None:
            self.advance()
            if self._memory is not None:
                time.sleep(_LOOK)

    def _staged(self, memory: SharedBuffer, order: dict[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
        past, spaces = 0, {}
        for space, boxes in order["spaces"].items():
            spaces[space], past = memory.plan(boxes, past)
        order = order | {"spaces": spaces}
        places = [box["at"] for boxes in spaces.values() for box in boxes]
        state_dict.stage(parts, places, memory.stage(order, past))
        return order

    def _start(self, order: Order, parts: Sequence[Part]) -> None:
        try:
            self._writing = (
                SubprocessWriter(self._memory)
                if self._memory
                else InProcessWriter(order, state_dict.payload(parts))
            )
        except OSError as error:  # no process can be started
            self._broken = error.errno or errno.EIO

    def _state(self) -> int:
        """This rank's number: how far it is."""
        if self._writing is None:
            return self._broken
        state = self._writing.state()
        got_on, self._bytes = self._writing.bytes > self._bytes, self._writing.bytes
        self.beat += got_on
        return _BUSY + got_on if state is None else state

    def _tell(self, word: str) -> None:
        self._told = word
        if self._writing is not None and self._mesh.rank == 0:
            self._writing.send(word)
        elif self._mesh.rank == 0 and word == DISCARD:
            assert self._said.save is not None
            assert self.iteration is not None
            checkpoint_dir.discard(self._said.save, self.iteration)
            self._broken = 0
        else:
            self._part()

    def _part(self) -> None:
        if self._writing is not None:
            self._writing.close()
        self._writing, self._broken = None, 0

    def _end(self, of_all: int, mine: int) -> None:
        assert self.iteration is not None
        iteration, note = self.iteration, self._writing.note if self._writing is not None else ""
        if self._told == COMMIT:
            self.problem = self._cause(of_all, mine) if of_all else ""
        self._part()
        self.iteration = None
        if not self.problem:
            self.saved_at, self._superseded = iteration, []
        if self._mesh.rank == 0 and self.problem:
            log.warning("%s", self._warning(iteration))
        if note:
            log.warning("%s: an earlier checkpoint cannot be removed: %s", self._said.save, note)
        written = self._clock() - self._began
        self.ended.append(
            Saved(
                iteration=iteration,
                seconds=written if self._memory is None else self._stalled,
                waited=self._waited,
                written=written,
                problem=self.problem,
            )
        )

    def _cause(self, of_all: int, mine: int) -> str:
        rank = self._mesh.all_reduce_max(self._mesh.rank if mine == of_all else -1)
        return describe_failure(of_all) + (f", on rank {rank}" if self._mesh.layout.world > 1 else "")

    def _warning(self, iteration: int) -> str:
        newest = (
            "none was written yet" if self.saved_at is None else f"iteration {self.saved_at} is the newest"
        )
        return (
            f"{self._said.save}: no checkpoint of iteration {iteration}: {self.problem}; "
            f"the run goes on, {newest}"
        )
