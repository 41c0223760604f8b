"""One-way lines between a rank of a pipeline and its neighbours.

A line is a process group of its two ends on which one end only sends and the other only receives. So the n-th
message sent is the n-th received whatever the transport, and neither end can wait for the other in a circle:
with NCCL, where all that a group carries goes through one stream, a message begun early would otherwise hold
up those in the other direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from mega_schema.parallel_layout import Layout


class Message:
    """A tensor on its way."""

    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self.tensor = tensor
        # gloo would take a second wait for one message as a wait for the next
        self._work: dist.Work | None = work

    def wait(self) -> Tensor:
        """The tensor, once it has arrived; on a GPU it is the stream that waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.tensor


@dataclass(frozen=True, slots=True)
class Line:
    """One end of a line.

    Attributes:
        group: the two ends.
        sends: whether this end sends, or receives.
    """

    group: dist.ProcessGroup
    sends: bool

    def begin(self, x: Tensor) -> Message:
        """Begin to send `x`, or to receive into it."""
        other = 1 - self.group.rank()
        call = dist.isend if self.sends else dist.irecv
        (work,) = dist.batch_isend_irecv([dist.P2POp(call, x, group=self.group, group_peer=other)])
        return Message(x, work)


@dataclass(frozen=True, slots=True)
class Lines:
    """A rank's lines to its neighbours; None where there is no neighbour.

    Attributes:
        output: to the next rank, and with virtual stages from the last to the first.
        input: from the rank before.
        input_gradient: to the rank before.
        output_gradient: from the next rank.
    """

    output: Line | None = None
    input: Line | None = None
    input_gradient: Line | None = None
    output_gradient: Line | None = None

    @classmethod
    def join(cls, layout: Layout, rank: int, *, timeout: timedelta) -> Lines:
        """Form the lines of all pipelines of the layout, all ranks together.

        Groups are formed at once where none of them share a rank: those from even places, from odd ones, and
        the one that closes the ring.
        """
        place, last, found = layout.coordinates(rank).pp, layout.pp - 1, cls()
        ring = [last] if layout.vp > 1 else []
        for places in (list(range(0, last, 2)), list(range(1, last, 2)), ring):
            if not places:
                continue
            pairs = [_pair(layout, at, p) for at in range(layout.world // layout.pp) for p in places]
            there, back = _group(pairs, timeout), _group(pairs, timeout)
            if there is None or back is None:
                continue
            if place in places:
                found = replace(found, output=Line(there, True), output_gradient=Line(back, False))
            else:
                found = replace(found, input=Line(there, False), input_gradient=Line(back, True))
        return found


def _pair(layout: Layout, rank: int, place: int) -> list[int]:
    """The ranks of this place and the next in the pipeline that begins at `rank`."""
    at = layout.coordinates(rank)
    return [layout.rank(replace(at, pp=p % layout.pp)) for p in (place, place + 1)]


def _group(pairs: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of this rank, of groups that share no rank; None where it is in none of them."""
    whole = dist.group.WORLD
    assert whole is not None
    if whole.bound_device_id is not None:  # NCCL: one call, however many groups
        return dist.split_group(split_ranks=list(pairs), timeout=timeout)
    group, _ = dist.new_subgroups_by_enumeration(list(pairs), timeout=timeout)
    return group
