"""Synchronise gradients over tp and pp after data parallelism reduced them; compute norms and clip."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_schema.params import Param, count_params
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.distributed.kv_replication import all_reduce_replicated, owned_gradients

_MAX_NAMED_RANKS = 16  # ranks named in a message


class ShardedWeights(Protocol):
    """The weights of one rank, whose state the replicas share: ZeRO's stages (arXiv:1910.02054)."""

    @property
    def models(self) -> Sequence[Decoder]:
        """The stages of this rank."""

    @property
    def params(self) -> Sequence[tuple[Param, nn.Parameter]]:
        """This rank's parameters in the order of the forward pass; those of stage 3 are DTensors."""

    @property
    def shard_ranges(self) -> Sequence[ShardRange]:
        """The range of each parameter that this rank owns."""

    @property
    def main_params(self) -> Sequence[Tensor]:
        """The float32 weights of each range, flat."""

    @property
    def is_sharded(self) -> bool:
        """Whether replicas own different ranges; otherwise each owns everything."""

    def copy_main_to_model_params(self) -> None:
        """Copy `main_params` to the model's weights on all replicas. A forward pass waits for them."""

    def wait_all_gather(self) -> None:
        """Wait until all weights are gathered."""

    def local_weights(self) -> Iterator[Tensor]:
        """Iterate over the model's weights on this rank; in stage 3 over its shards."""


class ShardedGradients(Protocol):
    """The gradients of one rank, which the replicas reduce and share."""

    @property
    def has_local_non_finite(self) -> bool:
        """Whether this rank's own gradients, before the reduction, were not finite."""

    def zero_grad(self, num_micro_batches: int) -> None:
        """Clear the gradients before a step of `num_micro_batches` micro-batches."""

    def reduce(self) -> Sequence[Tensor]:
        """Return the gradient of each range, flat and float32, summed over the replicas."""


class GradientSync:
    """The gradients of the ranges that this rank owns.

    Attributes:
        shards: the gradient of each range, flat and float32; valid after `reduce`.
        num_elements: of all parameters of the model, tied ones once, without padding.
    """

    def __init__(
        self, weights: ShardedWeights, gradients: ShardedGradients, mesh: Mesh, table: Collection[Param]
    ) -> None:
        """Synchronise the gradients of a rank.

        Args:
            table: every parameter of the model, in the order of the forward pass.
        """
        self.weights = weights
        self.gradients = gradients
        self.mesh = mesh
        self.rows = [shard.row for shard in weights.shard_ranges]
        self.names = [row.name for row in table]
        self.num_elements = count_params(table)
        self.tied_names = tied_across_stages(table, mesh)
        self._tied_layer_sizes = {  # elements on a rank of tp, at most
            row.name: math.prod(row.local_shape(mesh.tp.size))
            for row in table
            if row.name in self.tied_names and isinstance(row.stage, int)
        }
        self.shards: Sequence[Tensor] = ()

    def reduce(self, scale: float = 1.0) -> None:
        """Average over the replicas, then sum over tp and pp where ranks share the work.

        This is Megatron's order. A reduction over many ranks adds in an order that depends on a gradient's
        offset in its buffer, so replicated gradients could differ in bits; the last sum makes them equal
        again.

        Args:
            scale: the loss scale; gradients are divided by it.
        """
        self.shards = self.gradients.reduce()
        if (divisor := self.mesh.replicas.size * scale) != 1:
            self._multiply(1 / divisor)
        self._sum_partial_grads()
        all_reduce_replicated(self._flat_gradients(), self.mesh.tp)
        self._sync_tied_embeddings()
        self._sum_tied_layers()

    def _sum_partial_grads(self) -> None:
        """Sum over tp the gradients to which each rank contributes a part.

        They are those of its own heads and, with sequence parallelism outside the tensor-parallel regions, of
        its own tokens.
        """
        partial = [
            gradient
            for row, gradient in zip(self.rows, self.shards, strict=True)
            if row.is_per_head or (self.mesh.tp.sequence and row.split is None)
        ]
        if partial:  # a stage with only the embedding has none
            summed = self.mesh.tp.reduce(torch.cat(partial))
            for gradient, total in zip(partial, summed.split([g.numel() for g in partial]), strict=True):
                gradient.copy_(total)

    def norm(self) -> float:
        """Compute the global L2 norm; each element of each parameter counts once."""
        norms = [torch.linalg.vector_norm(g) for g in owned_gradients(self._flat_gradients(), self.mesh.tp)]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.mesh.device)
        return float(self._sum_over_ranks(square).sqrt())

    def num_zeros(self) -> float:
        """Count the zero elements of the gradients; each element of each parameter counts once.

        The non-zero elements are counted and subtracted from the table's total, which has no padding.
        """
        counts = [torch.count_nonzero(g) for g in owned_gradients(self._flat_gradients(), self.mesh.tp)]
        return float(self.num_elements - self._sum_over_ranks(self._sum_float64(counts)))

    def params_norm(self) -> float:
        """Compute the L2 norm of the weights; each element of each parameter counts once."""
        shards = zip(self.weights.shard_ranges, self.weights.main_params, strict=True)
        main_params = owned_gradients(
            ((shard.row, shard.begin, main_param) for shard, main_param in shards), self.mesh.tp
        )
        squares = [torch.linalg.vector_norm(main_param).double().square() for main_param in main_params]
        return float(self._sum_over_ranks(self._sum_float64(squares)).sqrt())

    def _sum_float64(self, scalars: Sequence[Tensor]) -> Tensor:
        """Sum scalars in float64, which counts exactly."""
        zero = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        return torch.cat([zero, *(part.double().view(1) for part in scalars)]).sum()

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum over all ranks the values of the elements that each owns."""
        if self.weights.is_sharded:
            self.mesh.replicas.reduce(x)
        return self.mesh.pp.reduce(self.mesh.tp.reduce(x))

    def first_non_finite(self) -> str:
        """Name the first parameter in the order of the backward pass whose gradient is not finite.

        With it the rank of origin, where that is known: the lowest one that holds a non-finite weight, or
        else the only rank of the replica whose local gradients were not finite. A replica on several ranks
        spreads the value by its activations and gradients, so all its ranks are named.
        """
        num_names = len(self.names)
        position = min(
            (
                num_names - self.names.index(row.name)
                for row, gradient in zip(self.rows, self.shards, strict=True)
                if not gradient.isfinite().all()
            ),
            default=num_names + 1,
        )
        world = self.mesh.layout.world
        rank = self.mesh.rank if self.gradients.has_local_non_finite else world
        bad_rank = self.mesh.rank if self._has_bad_weight() else world
        copy = self.mesh.layout.coordinates(rank).dp if rank < world else world
        first = torch.tensor([position, copy, bad_rank], device=self.mesh.device)
        for axis in (self.mesh.tp, self.mesh.replicas, self.mesh.pp):
            axis.reduce(first, "min")
        position, copy, bad_rank = first.tolist()
        name = self.names[num_names - position] if position <= num_names else "no parameter"
        if bad_rank < world:
            return f"{name}, on rank {bad_rank}, whose weights are not finite"
        ranks = [rank for rank in range(world) if self.mesh.layout.coordinates(rank).dp == copy]
        if len(ranks) < 2:
            return f"{name}, on rank {ranks[0]}" if ranks else name
        text = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS]))
        if len(ranks) > _MAX_NAMED_RANKS:
            text += ", ..."
        return f"{name}, on one of ranks {text}, a copy of the model"

    def _has_bad_weight(self) -> bool:
        """Whether a weight of this rank, as the forward pass used it, is not finite."""
        return any(not weight.isfinite().all() for weight in self.weights.local_weights())

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale the gradients to a norm of at most `max_norm`; with Megatron's 1e-6."""
        if max_norm > 0 and (scale := max_norm / (norm + 1e-6)) < 1:
            self._multiply(scale)

    def _multiply(self, factor: float) -> None:
        torch._foreach_mul_(list(self.shards), factor)

    def _flat_gradients(self) -> list[tuple[Param, int, Tensor]]:
        return [
            (shard.row, shard.begin, gradient)
            for shard, gradient in zip(self.weights.shard_ranges, self.shards, strict=True)
        ]

    def _sync_tied_embeddings(self) -> None:
        """Add up the two gradients of an embedding that the first stage and the last stage share."""
        pp = self.mesh.pp
        for row, gradient in zip(self.rows, self.shards, strict=True):
            if (row.tied_to or row.name) in self.tied_names and not isinstance(row.stage, int):
                received = torch.empty_like(gradient)
                peer = pp.size - 1 - pp.rank
                pp.exchange([(gradient, peer)], [(received, peer)])
                gradient.add_(received)

    def _sum_tied_layers(self) -> None:
        """Sum over pp the gradients of a table that layers of several stages share.

        A rank of an interleaved pipeline may hold it more than once, and another not at all.
        """
        sizes = self._tied_layer_sizes
        if not sizes:
            return
        totals = torch.zeros(sum(sizes.values()), device=self.mesh.device)
        parts = dict(zip(sizes, totals.split(list(sizes.values())), strict=True))
        shared = [
            (parts[row.tied_to or row.name], gradient)
            for row, gradient in zip(self.rows, self.shards, strict=True)
            if (row.tied_to or row.name) in sizes
        ]
        for total, gradient in shared:
            total[: gradient.numel()] += gradient
        self.mesh.pp.reduce(totals)
        for total, gradient in shared:
            gradient.copy_(total[: gradient.numel()])


def tied_across_stages(table: Collection[Param], mesh: Mesh) -> Collection[str]:
    """Return the names of the parameters that are tied to one on another pipeline stage."""
    return {row.tied_to for row in table if row.tied_to} if mesh.pp.size > 1 else ()
