"""Key and value heads that neighbours of tp hold alike: gradients are added up, elements counted once.

A gradient here is a stretch of a parameter's local tensor, flat, with the place of its first element; all
neighbours have the same stretch of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.params import Param

FlatGradient = tuple[Param, int, Tensor]


def all_reduce_replicated(gradients: Iterable[FlatGradient], tp: Axis) -> None:
    """Sum what several ranks hold over its holders, in place: each has the part of its own query heads.

    Every group of holders has a row of its own in one sum over tp, so that no groups of processes are needed
    for this; it happens once a step.
    """
    for row, begin, gradient in gradients:
        if (replicated := row.repeated(tp.size)) is None:
            continue
        shard = gradient[_clamp_offset(begin, replicated.begin) : _clamp_offset(begin, replicated.end)]
        slots = shard.new_zeros((tp.size // replicated.holders, shard.numel()))
        own_slot = slots[tp.rank // replicated.holders]
        own_slot.copy_(shard)
        tp.reduce(slots)
        shard.copy_(own_slot)


def owned_gradients(gradients: Iterable[FlatGradient], tp: Axis) -> list[Tensor]:
    """The parts of them that this rank answers for: over tp, every element once, of tied parameters none."""
    owned: list[Tensor] = []
    for row, begin, gradient in gradients:
        replicated = row.repeated(tp.size)
        if row.tied_to is not None or (row.split is None and tp.rank != 0):
            continue
        if replicated is None or tp.rank % replicated.holders == 0:
            owned.append(gradient)
        else:
            first_end, second_start = (
                _clamp_offset(begin, replicated.begin),
                _clamp_offset(begin, replicated.end),
            )
            owned += [gradient[:first_end], gradient[second_start:]]
    return owned


def _clamp_offset(begin: int, position: int) -> int:
    """Where a place of the local tensor is in a stretch that begins at `begin`; 0 if it was before it."""
    return max(0, position - begin)
