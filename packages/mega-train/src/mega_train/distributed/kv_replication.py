"""Key and value heads that several tp ranks hold: sum their gradients, count their elements once.

A gradient here is a range of a parameter's flattened local tensor, with the offset of its first element; all
tp ranks have the same range.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.params import Param

FlatGradient = tuple[Param, int, Tensor]


def all_reduce_replicated(gradients: Iterable[FlatGradient], tp: Axis) -> None:
    """Sum the gradients of replicated heads in place: each replica has the part of its own query heads.

    Each group of replicas has a slot in one all-reduce over tp. That needs no process groups for the groups,
    and it happens once a step.
    """
    for row, begin, gradient in gradients:
        if (replicated := row.replicated_range(tp.size)) is None:
            continue
        shard = gradient[_clamp_offset(begin, replicated.begin) : _clamp_offset(begin, replicated.end)]
        slots = shard.new_zeros((tp.size // replicated.head_replicas, shard.numel()))
        own_slot = slots[tp.rank // replicated.head_replicas]
        own_slot.copy_(shard)
        tp.reduce(slots)
        shard.copy_(own_slot)


def owned_gradients(gradients: Iterable[FlatGradient], tp: Axis) -> list[Tensor]:
    """Select the gradients that this rank owns: over tp every element once, and none of tied parameters."""
    owned: list[Tensor] = []
    for row, begin, gradient in gradients:
        replicated = row.replicated_range(tp.size)
        if row.tied_to is not None or (row.split is None and tp.rank != 0):
            continue
        if replicated is None or tp.rank % replicated.head_replicas == 0:
            owned.append(gradient)
        else:
            first_end, second_start = (
                _clamp_offset(begin, replicated.begin),
                _clamp_offset(begin, replicated.end),
            )
            owned += [gradient[:first_end], gradient[second_start:]]
    return owned


def _clamp_offset(begin: int, position: int) -> int:
    """Convert an offset in the local tensor to one in a range that starts at `begin`; 0 before it."""
    return max(0, position - begin)
