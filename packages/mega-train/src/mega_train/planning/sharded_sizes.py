"""Elements and layers of each pipeline rank, from the parameter table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mega_schema.arch import table
from mega_schema.parallel_layout import Layout, Stage
from mega_schema.sharding import block_lengths
from mega_schema.spec import ModelSpec

Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class ParamShares:
    """Elements of one tensor-parallel rank's shard of the model, with padding.

    Attributes:
        first, last: of the rows on the first and the last stage; `last` without a tied output weight.
        tied: of that tied output weight, which is the embedding where one rank holds both.
        layers: of every layer.
        matrices: (rows, columns) of the matrices of one layer; layers are alike.
        queries, keys: widths of the queries, and of the keys or values, that a rank computes.
        head: (rows, columns) of the output weight.
    """

    first: int
    last: int
    tied: int
    layers: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]
    queries: int
    keys: int
    head: tuple[int, int]

    @classmethod
    def from_spec(cls, spec: ModelSpec, tp: int) -> ParamShares:
        """Compute the shares from the parameter table of a model.

        Raises:
            LayoutError: a dimension does not divide over tp.
        """
        ends = {"first": 0, "last": 0, "tied": 0}
        layers = [0] * spec.layers
        matrices = []
        head = (0, 0)
        queries = 0
        keys = 0
        for row in table(spec):
            shape = row.local_shape(tp)
            if isinstance(row.stage, int):
                layers[row.stage] += math.prod(shape)
                if row.stage == 0 and len(shape) == 2:
                    matrices.append((shape[0], shape[1]))
                if row.name == "layers.0.qkv.weight":
                    assert row.split is not None
                    queries, keys, _ = block_lengths(row.name, row.shape, row.split, tp)
            else:
                ends["tied" if row.tied_to else row.stage] += math.prod(shape)
                if row.stage == "last" and len(shape) == 2:
                    head = (shape[0], shape[1])
        return cls(
            ends["first"],
            ends["last"],
            ends["tied"],
            tuple(layers),
            tuple(matrices),
            queries,
            keys,
            head,
        )

    def elements_on(self, stages: Sequence[Stage]) -> int:
        """Count the elements of the rank with these stages."""
        first, last = stages[0].is_first, stages[-1].is_last
        ends = first * self.first + last * (self.last + (0 if first else self.tied))
        return ends + sum(self.layers[i] for stage in stages for i in stage.layers)


@dataclass(frozen=True)
class ShardedModel:
    """A model on a layout.

    Attributes:
        stages: of every pipeline rank, in the order of the forward pass: one, or vp of them.
    """

    spec: ModelSpec
    layout: Layout
    shares: ParamShares
    stages: tuple[Stages, ...]

    @classmethod
    def from_layout(cls, spec: ModelSpec, layout: Layout) -> ShardedModel:
        """Assign the layers of a model to the ranks of a layout.

        Raises:
            LayoutError: the model cannot be split this way.
        """
        return cls(spec, layout, ParamShares.from_spec(spec, layout.tp), stages_by_rank(spec.layers, layout))

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements per rank, by pipeline rank."""
        return tuple(self.shares.elements_on(stages) for stages in self.stages)

    @cached_property
    def layers_per_rank(self) -> tuple[int, ...]:
        """Layers per rank, by pipeline rank."""
        return tuple(sum(len(stage.layers) for stage in stages) for stages in self.stages)

    @cached_property
    def distinct_ranks(self) -> tuple[int, ...]:
        """The first pipeline rank of every kind.

        Every other rank has the layers and work of one of these, and no more micro-batches in flight.
        """
        first_of_kind: dict[tuple[object, ...], int] = {}
        for pp_rank, stages in enumerate(self.stages):
            kind = (stages[0].is_first, stages[-1].is_last, *(len(stage.layers) for stage in stages))
            first_of_kind.setdefault(kind, pp_rank)
        return tuple(first_of_kind.values())


def stages_by_rank(layers: int, layout: Layout) -> tuple[Stages, ...]:
    """List the stages of every pipeline rank.

    Raises:
        LayoutError: a stage would have no layer.
    """
    return tuple(
        tuple(layout.stage(pp_rank, layers, chunk) for chunk in range(layout.vp))
        for pp_rank in range(layout.pp)
    )
