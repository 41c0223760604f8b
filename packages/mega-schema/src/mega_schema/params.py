"""The parameter table: one row per parameter, the only definition of its name, shape and split.

Construction, initial values, saving, loading, resharding, weight decay, tied gradients and pipeline stages
all read these rows; a module never states a shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mega_schema.parallel_layout import Stage
from mega_schema.sharding import (
    ReplicatedRange,
    Shape,
    Slab,
    Split,
    local_shape,
    replicated_range,
    saved_boxes,
    slabs,
)

StageRef = Literal["first", "last"] | int


@dataclass(frozen=True, slots=True)
class Init:
    """Initial values of a parameter; normal and uniform have mean 0 and standard deviation `std`."""

    kind: Literal["zeros", "ones", "normal", "uniform"]
    std: float = 0.0


ZEROS, ONES = Init("zeros"), Init("ones")


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the whole model.

    Attributes:
        name: its key in a checkpoint and in the model.
        shape: of the whole tensor, without padding.
        stage: the pipeline stage that holds it: the first, the last, or that of a layer by its global number.
        init: its initial values.
        split: how it is split over the mesh; None: every rank of its stage holds it whole.
        decay: whether weight decay applies.
        is_per_head: whole on every rank, but a rank of tp uses it only for its own heads. Its gradient on a
            rank is therefore partial, with or without sequence parallelism.
        tied_to: name of the row whose values this one shares. It is not on disk and has no optimizer state.
    """

    name: str
    shape: Shape
    stage: StageRef
    init: Init
    split: Split | None = None
    decay: bool = True
    tied_to: str | None = None
    is_per_head: bool = False

    @property
    def size(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def is_on(self, stage: Stage) -> bool:
        """Whether the pipeline stage holds this parameter."""
        if self.stage == "first":
            return stage.is_first
        if self.stage == "last":
            return stage.is_last
        return self.stage in stage.layers

    def local_shape(self, tp: int) -> Shape:
        """Return the shape of one rank's shard over `tp` ranks, padding included."""
        return local_shape(self.name, self.shape, self.split, tp)

    def slabs(self, rank: int, tp: int) -> tuple[Slab, ...]:
        """Return the boxes of the whole tensor that rank `rank` of `tp` holds."""
        return slabs(self.name, self.shape, self.split, rank, tp)

    def saved_boxes(self, rank: int, tp: int) -> tuple[Slab, ...]:
        """Return the boxes that rank `rank` of `tp` saves; none for a tied parameter."""
        return () if self.tied_to else saved_boxes(self.name, self.shape, self.split, rank, tp)

    def replicated_range(self, tp: int) -> ReplicatedRange | None:
        """Return the elements of a split parameter that neighbours of `tp` ranks replicate."""
        return replicated_range(self.name, self.shape, self.split, tp)


def is_embedding_or_output(row: Param) -> bool:
    """Whether the row is the token embedding or the output matrix."""
    return row.name in ("embed.weight", "head.weight")


def is_layer_matrix(row: Param) -> bool:
    """Whether the row is a matrix of a layer: not an embedding, position table or head."""
    return isinstance(row.stage, int) and len(row.shape) == 2 and not row.name.startswith("relative_bias.")


def count_params(rows: Iterable[Param]) -> int:
    """Count the parameters of a model, a tied one once."""
    return sum(row.size for row in rows if row.tied_to is None)
