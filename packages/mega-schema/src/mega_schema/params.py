"""One row per parameter: the only place that says what a weight is called, how long it is and how it is cut.

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
    """How a parameter begins: zeros, ones, or drawn about zero, normal or uniform, with this deviation."""

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
        split: how it is cut over the mesh; None means that every rank of its stage holds it whole.
        decay: whether weight decay applies.
        of_heads: it is whole on every rank, but a rank of tp uses it for its own heads alone, so that its
            gradient there is a part of the whole one, with sequence parallelism and without.
        tied_to: name of the row whose values this one shares. It is not on disk, and has no optimizer state
            of its own.
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
        """Shape of one rank's share when cut over `tp` ranks, padding included."""
        return local_shape(self.name, self.shape, self.split, tp)

    def slabs(self, rank: int, tp: int) -> tuple[Slab, ...]:
        """The boxes of the whole tensor that rank `rank` of `tp` holds."""
        return slabs(self.name, self.shape, self.split, rank, tp)

    def saved_boxes(self, rank: int, tp: int) -> tuple[Slab, ...]:
        """The boxes that rank `rank` of `tp` answers for; none of a parameter that is tied to another."""
        return () if self.tied_to else saved_boxes(self.name, self.shape, self.split, rank, tp)

    def replicated_range(self, tp: int) -> ReplicatedRange | None:
        """What neighbours of `tp` ranks hold alike of a parameter that is cut."""
        return replicated_range(self.name, self.shape, self.split, tp)


def is_embedding_or_output(row: Param) -> bool:
    """Whether it is the matrix of tokens' vectors, or the one that scores them."""
    return row.name in ("embed.weight", "head.weight")


def is_layer_matrix(row: Param) -> bool:
    """Whether it is a matrix of a layer: no embedding, no table of positions, no head."""
    return isinstance(row.stage, int) and len(row.shape) == 2


def count_params(rows: Iterable[Param]) -> int:
    """Parameters of a model, a tied one counted once."""
    return sum(row.size for row in rows if row.tied_to is None)
