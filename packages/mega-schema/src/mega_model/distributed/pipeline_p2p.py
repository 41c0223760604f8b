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


class PendingMessage:
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
class P2PChannel:
    """One end of a line.

    Attributes:
        group: the two ends.
        sends: whether this end sends, or receives.
    """

    group: dist.ProcessGroup
    sends: bool

    def begin(self, x: Tensor) -> PendingMessage:
        """Begin to send `x`, or to receive into it."""
        peer = 1 - self.group.rank()
        call = dist.isend if self.sends else dist.irecv
        (work,) = dist.batch_isend_irecv([dist.P2POp(call, x, group=self.group, group_peer=peer)])
        return PendingMessage(x, work)


@dataclass(frozen=True, slots=True)
class PipelineChannels:
    """A rank's lines to its neighbours; None where there is no neighbour.

    Attributes:
        output: to the next rank, and with virtual stages from the last to the first.
        input: from the rank before.
        input_gradient: to the rank before.
        output_gradient: from the next rank.
    """

    output: P2PChannel | None = None
    input: P2PChannel | None = None
    input_gradient: P2PChannel | None = None
    output_gradient: P2PChannel | None = None

    @classmethod
    def join(cls, layout: Layout, rank: int, *, timeout: timedelta) -> PipelineChannels:
        """Form the lines of all pipelines of the layout, all ranks together.

        Groups are formed at once where none of them share a rank: those from even places, from odd ones, and
        the one that closes the ring.
        """
        position, last, channels = layout.coordinates(rank).pp, layout.pp - 1, cls()
        ring = [last] if layout.vp > 1 else []
        for positions in (list(range(0, last, 2)), list(range(1, last, 2)), ring):
            if not positions:
                continue
            pairs = [
                _pair_ranks(layout, pipeline, p)
                for pipeline in range(layout.world // layout.pp)
                for p in positions
            ]
            forward_group, backward_group = _new_group(pairs, timeout), _new_group(pairs, timeout)
            if forward_group is None or backward_group is None:
                continue
            if position in positions:
                channels = replace(
                    channels,
                    output=P2PChannel(forward_group, True),
                    output_gradient=P2PChannel(backward_group, False),
                )
            else:
                channels = replace(
                    channels,
                    input=P2PChannel(forward_group, False),
                    input_gradient=P2PChannel(backward_group, True),
                )
        return channels


def _pair_ranks(layout: Layout, rank: int, position: int) -> list[int]:
    """The ranks of this place and the next in the pipeline that begins at `rank`."""
    coordinates = layout.coordinates(rank)
    return [layout.rank(replace(coordinates, pp=p % layout.pp)) for p in (position, position + 1)]


def _new_group(pairs: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of this rank, of groups that share no rank; None where it is in none of them."""
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:  # NCCL: one call, however many groups
        return dist.split_group(split_ranks=list(pairs), timeout=timeout)
    group, _ = dist.new_subgroups_by_enumeration(list(pairs), timeout=timeout)
    return group
