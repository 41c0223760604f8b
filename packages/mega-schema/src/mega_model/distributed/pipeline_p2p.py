"""One-way point-to-point channels between neighbours of a pipeline.

A channel is a process group of two ranks in which one only sends and the other only receives. The n-th
message sent is therefore the n-th received on any transport, and the two cannot deadlock. Under NCCL a group
is one stream: with a shared group, a message posted early would block messages in the other direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from mega_schema.parallel_layout import Layout


class PendingMessage:
    """A tensor being sent or received."""

    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self.tensor = tensor
        # a second wait would make gloo wait for the next message
        self._work: dist.Work | None = work

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor; on a GPU the stream waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.tensor


@dataclass(frozen=True, slots=True)
class P2PChannel:
    """One end of a one-way channel.

    Attributes:
        group: the two ranks.
        sends: whether this end sends or receives.
    """

    group: dist.ProcessGroup
    sends: bool

    def begin(self, x: Tensor) -> PendingMessage:
        """Start to send `x`, or to receive into it."""
        peer = 1 - self.group.rank()
        call = dist.isend if self.sends else dist.irecv
        (work,) = dist.batch_isend_irecv([dist.P2POp(call, x, group=self.group, group_peer=peer)])
        return PendingMessage(x, work)


@dataclass(frozen=True, slots=True)
class PipelineChannels:
    """A rank's channels to its pipeline neighbours; None where there is no neighbour.

    Attributes:
        output: to the next rank, and with virtual stages from the last to the first.
        input: from the previous rank.
        input_gradient: to the previous rank.
        output_gradient: from the next rank.
    """

    output: P2PChannel | None = None
    input: P2PChannel | None = None
    input_gradient: P2PChannel | None = None
    output_gradient: P2PChannel | None = None

    @classmethod
    def join(cls, layout: Layout, rank: int, *, timeout: timedelta) -> PipelineChannels:
        """Form the channels of all pipelines of the layout; every rank must call it.

        Pairs that share no rank are formed in one call: those from even positions, those from odd ones, and
        the pair that closes the ring.
        """
        position = layout.coordinates(rank).pp
        last = layout.pp - 1
        channels = cls()
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
    """Return the global ranks at this position and the next, in the pipeline that `rank` begins."""
    coordinates = layout.coordinates(rank)
    return [layout.rank(replace(coordinates, pp=p % layout.pp)) for p in (position, position + 1)]


def _new_group(pairs: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Form this rank's group out of disjoint pairs; None if it is in none of them."""
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:  # NCCL: one call, however many groups
        return dist.split_group(split_ranks=list(pairs), timeout=timeout)
    group, _ = dist.new_subgroups_by_enumeration(list(pairs), timeout=timeout)
    return group
