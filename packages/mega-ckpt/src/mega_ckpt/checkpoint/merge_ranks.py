"""A model in the files of several ranks: what each has of its own, and what all have alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mega_ckpt.checkpoint.checkpoint_source import Found
from mega_ckpt.name_maps.alias import Foreign
from mega_ckpt.tensors.mapped_tensor import Stored, same
from mega_schema.errors import FormatError
from mega_schema.shard import Shape


@dataclass(frozen=True, slots=True)
class Joined:
    """The tensors of all ranks.

    Attributes:
        found: each box of a parameter once, from the first rank that has it.
        differing: two tensors that should be alike and are not, and the name of the second.
    """

    found: Found
    differing: tuple[tuple[Stored, Stored, str], ...]

    def alike(self) -> Found:
        """The tensors.

        Raises:
            FormatError: ranks differ in what all of them should have.
        """
        for first, other, name in self.differing:
            hint = "these are parts of two checkpoints; take all of one"
            raise FormatError(f"{other.file}: {name}", f"differs from {first.file.name}'s", hint=hint)
        return self.found


def joined(ranks: Iterable[Found]) -> Joined:
    """The tensors of all ranks; those that several have, read and held against each other."""
    kept: dict[tuple[str, tuple[tuple[Shape, Shape], ...]], tuple[Foreign, Stored]] = {}
    differing = []
    for found in ranks:
        for foreign, stored in found:
            key = (foreign.ours, tuple((box.start, box.shape) for box in foreign.boxes))
            _, first = kept.setdefault(key, (foreign, stored))
            if first is not stored and not same(first, stored):
                differing.append((first, stored, foreign.name))
    return Joined(list(kept.values()), tuple(differing))
