"""Key and value heads that neighbours of tp hold alike: gradients are added up, elements counted once.

A gradient here is a stretch of a parameter's local tensor, flat, with the place of its first element; all
neighbours have the same stretch of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.params import Param

Part = tuple[Param, int, Tensor]


def add_up(gradients: Iterable[Part], tp: Axis) -> None:
    """Sum what several ranks hold over its holders, in place: each has the part of its own query heads.

    Every group of holders has a row of its own in one sum over tp, so that no groups of processes are needed
    for this; it happens once a step.
    """
    for row, begin, gradient in gradients:
        if (repeated := row.replicated_range(tp.size)) is None:
            continue
        part = gradient[_inside(begin, repeated.begin) : _inside(begin, repeated.end)]
        rooms = part.new_zeros((tp.size // repeated.head_replicas, part.numel()))
        mine = rooms[tp.rank // repeated.head_replicas]
        mine.copy_(part)
        tp.reduce(rooms)
        part.copy_(mine)


def answered(gradients: Iterable[Part], tp: Axis) -> list[Tensor]:
    """The parts of them that this rank answers for: over tp, every element once, of tied parameters none."""
    found: list[Tensor] = []
    for row, begin, gradient in gradients:
        repeated = row.replicated_range(tp.size)
        if row.tied_to is not None or (row.split is None and tp.rank != 0):
            continue
        if repeated is None or tp.rank % repeated.head_replicas == 0:
            found.append(gradient)
        else:
            before, after = _inside(begin, repeated.begin), _inside(begin, repeated.end)
            found += [gradient[:before], gradient[after:]]
    return found


def _inside(begin: int, place: int) -> int:
    """Where a place of the local tensor is in a stretch that begins at `begin`; 0 if it was before it."""
    return max(0, place - begin)
