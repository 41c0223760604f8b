"""Merge the tensor files of several ranks: shards are kept, replicas are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mega_ckpt.checkpoint.checkpoint_source import MatchedTensors
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.tensors.mapped_tensor import MappedTensor, tensors_equal
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape


@dataclass(frozen=True, slots=True)
class MergedRanks:
    """The tensors of all ranks; each replica is kept once.

    Attributes:
        tensors: each box of a parameter once, from the first rank that has it.
        differing: pairs of replicas that differ, with the name of the second.
    """

    tensors: MatchedTensors
    differing: tuple[tuple[MappedTensor, MappedTensor, str], ...]

    def require_equal(self) -> MatchedTensors:
        """Return the tensors, if all replicas are equal.

        Raises:
            FormatError: replicas differ between ranks.
        """
        for first, second, name in self.differing:
            hint = "these files belong to two checkpoints; use the files of one"
            raise FormatError(f"{second.file}: {name}", f"differs from {first.file.name}'s", hint=hint)
        return self.tensors


def merge_ranks(ranks: Iterable[MatchedTensors]) -> MergedRanks:
    """Merge the tensors of all ranks; compare the tensors that several ranks have."""
    unique: dict[tuple[str, tuple[tuple[Shape, Shape], ...]], tuple[ForeignTensor, MappedTensor]] = {}
    differing = []
    for rank in ranks:
        for foreign, stored in rank:
            key = (foreign.ours, tuple((box.start, box.shape) for box in foreign.boxes))
            _, first = unique.setdefault(key, (foreign, stored))
            if first is not stored and not tensors_equal(first, stored):
                differing.append((first, stored, foreign.name))
    return MergedRanks(list(unique.values()), tuple(differing))
