"""The gradients of a step once replicas have added theirs up: summed over tp and pp, measured, clipped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_schema.params import Param, count_params
from mega_train.distributed.bucket_layout import Stretch
from mega_train.distributed.kv_replication import add_up, answered

_NAMED = 16  # ranks that a message names


class Shards(Protocol):
    """How the replicas of a model share the work of keeping it: ZeRO's stages (arXiv:1910.02054)."""

    @property
    def models(self) -> Sequence[Decoder]:
        """The stages this rank holds."""

    @property
    def held(self) -> Sequence[tuple[Param, nn.Parameter]]:
        """This rank's parameters in the order of the forward pass; those of stage 3 are DTensors."""

    @property
    def stretches(self) -> Sequence[Stretch]:
        """What this rank keeps of each of them."""

    @property
    def main(self) -> Sequence[Tensor]:
        """The float32 weights of each stretch, flat."""

    @property
    def sharded(self) -> bool:
        """Whether replicas keep different stretches; else each of them keeps all."""

    @property
    def spoiled(self) -> bool:
        """Whether this rank's own gradients, before the replicas' were added, were not finite."""

    def begin(self, micros: int) -> None:
        """Forget the step before. `micros` micro-batches come."""

    def reduce(self) -> Sequence[Tensor]:
        """The gradient of each stretch, flat and float32: the sum over the replicas, all of them together."""

    def publish(self) -> None:
        """Make the model's weights those of `main`, on all replicas. A forward pass waits for them."""

    def settle(self) -> None:
        """Wait until every weight has arrived."""

    def local_weights(self) -> Iterator[Tensor]:
        """The model's weights as this rank holds them; of stage 3 its shard of each."""


class Gradients:
    """The gradients of the stretches this rank keeps.

    Attributes:
        of: of each stretch, flat and float32; those of a step after `reduce`.
        elements: of all parameters of the model, tied ones once, without padding.
    """

    def __init__(self, shards: Shards, mesh: Mesh, table: Collection[Param]) -> None:
        """
        Args:
            table: every parameter of the model, in the order of the forward pass.
        """
        self.shards, self.mesh, self.rows = shards, mesh, [stretch.row for stretch in shards.stretches]
        self.names = [row.name for row in table]
        self.elements = count_params(table)
        self.shared = tied_over_stages(table, mesh)
        self.of: Sequence[Tensor] = ()

    def reduce(self, scale: float = 1.0) -> None:
        """Make them the whole batch's: mean over replicas, then sums over tp and pp where ranks share work.

        In this order (Megatron's), since a sum over many ranks adds up in an order that depends on where in a
        buffer a gradient lies: what several ranks hold alike is made alike by the last sum.

        Args:
            scale: what the loss was multiplied by; they are divided by it.
        """
        self.of = self.shards.reduce()
        if (parts := self.mesh.replicas.size * scale) != 1:
            self._multiply(1 / parts)
        self._add_parts()
        add_up(self._stretches(), self.mesh.tp)
        self._tie()

    def _add_parts(self) -> None:
        """Sum over tp what all its ranks hold and each used in part: for its own heads; and with sequence
        parallelism, outside the tensor-parallel regions, for its own tokens.
        """
        parts = [
            gradient
            for row, gradient in zip(self.rows, self.of, strict=True)
            if row.is_per_head or (self.mesh.tp.sequence and row.split is None)
        ]
        if parts:  # a stage that is an embedding and no layer has none
            together = self.mesh.tp.reduce(torch.cat(parts))
            for gradient, total in zip(parts, together.split([g.numel() for g in parts]), strict=True):
                gradient.copy_(total)

    def norm(self) -> float:
        """Global L2 norm, every element of every parameter counted on one rank."""
        norms = [torch.linalg.vector_norm(g) for g in answered(self._stretches(), self.mesh.tp)]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.mesh.device)
        return float(self._of_all_ranks(square).sqrt())

    def zeros(self) -> float:
        """How many elements of the gradients are zero, every element of every parameter counted once.

        What is not zero is counted and the rest is taken from the table, so that padding is not in it.
        """
        found = [torch.count_nonzero(g) for g in answered(self._stretches(), self.mesh.tp)]
        return float(self.elements - self._of_all_ranks(self._sum(found)))

    def params_norm(self) -> float:
        """L2 norm of the weights, every element of every parameter counted once."""
        stretches = zip(self.shards.stretches, self.shards.main, strict=True)
        mains = answered(((s.row, s.begin, main) for s, main in stretches), self.mesh.tp)
        squares = [torch.linalg.vector_norm(main).double().square() for main in mains]
        return float(self._of_all_ranks(self._sum(squares)).sqrt())

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        """In float64, which counts exactly."""
        none = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        return torch.cat([none, *(part.double().view(1) for part in parts)]).sum()

    def _of_all_ranks(self, x: Tensor) -> Tensor:
        """The sum of what each of them answers for."""
        if self.shards.sharded:
            self.mesh.replicas.reduce(x)
        return self.mesh.pp.reduce(self.mesh.tp.reduce(x))

    def first_non_finite(self) -> str:
        """The first parameter in the order of the backward pass whose gradient is not finite.

        With it the rank on which it began, where that is known: the lowest one that holds such a weight, or
        else the only rank of the copy of the model whose part of the batch gave such a gradient. In a copy on
        several ranks it reaches all of them, by activations or their gradients: then all are named.
        """
        late = len(self.names)
        place = min(
            (
                late - self.names.index(row.name)
                for row, gradient in zip(self.rows, self.of, strict=True)
                if not gradient.isfinite().all()
            ),
            default=late + 1,
        )
        world = self.mesh.layout.world
        rank = self.mesh.rank if self.shards.spoiled else world
        holder = self.mesh.rank if self._has_bad_weight() else world
        copy = self.mesh.layout.coordinates(rank).dp if rank < world else world
        first = torch.tensor([place, copy, holder], device=self.mesh.device)
        for axis in (self.mesh.tp, self.mesh.replicas, self.mesh.pp):
            axis.reduce(first, "min")
        place, copy, holder = first.tolist()
        name = self.names[late - place] if place <= late else "no parameter"
        if holder < world:
            return f"{name}, on rank {holder}, whose weights are not finite"
        ranks = [rank for rank in range(world) if self.mesh.layout.coordinates(rank).dp == copy]
        if len(ranks) < 2:
            return f"{name}, on rank {ranks[0]}" if ranks else name
        words = ", ".join(map(str, ranks[:_NAMED])) + ", ..." * (len(ranks) > _NAMED)
        return f"{name}, on one of ranks {words}, a copy of the model"

    def _has_bad_weight(self) -> bool:
        """Whether a weight of this rank, as the forward pass used it, is not finite."""
        return any(not weight.isfinite().all() for weight in self.shards.local_weights())

    def clip(self, norm: float, most: float) -> None:
        """Scale down so that the norm is at most `most`; Megatron's coefficient, with its 1e-6."""
        if most > 0 and (scale := most / (norm + 1e-6)) < 1:
            self._multiply(scale)

    def _multiply(self, factor: float) -> None:
        torch._foreach_mul_(list(self.of), factor)

    def _stretches(self) -> list[tuple[Param, int, Tensor]]:
        return [(s.row, s.begin, g) for s, g in zip(self.shards.stretches, self.of, strict=True)]

    def _tie(self) -> None:
        """Add the two gradients of a parameter that the first stage reads and the last stage scores with."""
        pp = self.mesh.pp
        for row, gradient in zip(self.rows, self.of, strict=True):
            if (row.tied_to or row.name) in self.shared:
                other, end = torch.empty_like(gradient), pp.size - 1 - pp.rank
                pp.exchange([(gradient, end)], [(other, end)])
                gradient.add_(other)


def tied_over_stages(table: Collection[Param], mesh: Mesh) -> Collection[str]:
    """Names of the parameters that one on another pipeline stage is tied to."""
    return {row.tied_to for row in table if row.tied_to} if mesh.pp.size > 1 else ()
