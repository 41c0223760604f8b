"""Muon (Jordan 2024, arXiv:2502.16982): orthogonalised momentum for matrices, AdamW for other weights.

A step needs a layer's whole matrices, and a rank owns ranges of their shards. So matrices are gathered before
the Newton-Schulz iteration and scattered after it: over tp by a sum, over the replicas that share the
optimizer's state by one collective each way, in which every replica works on another matrix. Queries, keys
and values are separate matrices, and so are gate and up, which are fused only for speed. The layout changes
only the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.checkpoint.flat_ranges import FlatFragment, fragments
from mega_schema.params import is_layer_matrix
from mega_schema.sharding import Slab
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.optim.adamw import AdamW
from mega_train.optim.base import MOMENTUM, LoadShard

T = TypeVar("T")
NEWTON_SCHULZ_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at zero, and from there within 0.7 to 1.2 (Jordan 2024)
_ADAMW_RMS = 0.2  # root mean square of AdamW's usual update (arXiv:2502.16982 §2.2)


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate U Vᵀ of the SVD U S Vᵀ by five quintic Newton-Schulz steps, in `dtype`."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """This rank's shard of one matrix of a parameter, such as its queries.

    Attributes:
        index: index of the range in the list given to `matrix_shards`.
        owned: the elements that this rank contributes; every element has one owner over tp and the replicas.
        stored: the elements that this rank stores; other ranks may store them too.
    """

    shape: tuple[int, int]
    index: int
    owned: tuple[FlatFragment, ...]
    stored: tuple[FlatFragment, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def copy_to_full(self, shard: Tensor, full: Tensor) -> None:
        """Copy the elements that this rank contributes into the full matrix."""
        for fragment in self.owned:
            full[fragment.slab.in_global] = shard[fragment.in_range].view(fragment.block)[
                fragment.slab.in_local
            ]

    def copy_from_full(self, full: Tensor, shard: Tensor) -> None:
        """Copy this rank's elements from the full matrix."""
        for fragment in self.stored:
            shard[fragment.in_range].view(fragment.block)[fragment.slab.in_local] = full[
                fragment.slab.in_global
            ]


def matrix_shards(shard_ranges: Sequence[ShardRange], tp: Axis) -> Iterator[MatrixShard]:
    """List the matrices of these ranges, the same on every rank of tp and every replica."""
    for index, shard in enumerate(shard_ranges):
        row = shard.row
        rows, columns = row.shape
        blocks = row.split.blocks if row.split and row.split.blocks else (rows,)
        shape = row.local_shape(tp.size)
        shard_range = (shard.begin, shard.end)
        owned = list(fragments(row.saved_boxes(tp.rank, tp.size), shape, *shard_range))
        stored = list(fragments(row.slabs(tp.rank, tp.size), shape, *shard_range))
        first_row = 0
        for block in blocks:
            row_range = (first_row, first_row + block)
            yield MatrixShard(
                (block, columns),
                index,
                tuple(_within_rows(owned, *row_range)),
                tuple(_within_rows(stored, *row_range)),
            )
            first_row += block


def _within_rows(fragments: Sequence[FlatFragment], begin: int, end: int) -> Iterator[FlatFragment]:
    """Select the fragments in a block of rows, with rows counted from its first; no box spans two blocks."""
    for fragment in fragments:
        first_row, *column_start = fragment.slab.start
        if begin <= first_row < end:
            yield replace(
                fragment,
                slab=Slab((first_row - begin, *column_start), fragment.slab.shape, fragment.slab.local_start),
            )


class Muon:
    """Muon for the layers' matrices, AdamW for the rest; weight decay is decoupled in both.

    The update of a matrix is scaled to the root mean square of AdamW's, so that both use one learning rate
    and one weight decay.
    """

    def __init__(
        self,
        shard_ranges: Sequence[ShardRange],
        main_params: Sequence[Tensor],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        tp: Axis,
        replicas: Axis,
        is_sharded: bool,
        dtype: torch.dtype,
        adamw_class: type[AdamW] = AdamW,
    ) -> None:
        """Build the optimizer with zero momentum.

        Args:
            is_sharded: replicas own different ranges; otherwise each owns everything.
            dtype: of the Newton-Schulz iteration.
            adamw_class: the implementation of AdamW.
        """
        self.momentum = momentum
        self.tp = tp
        self.replicas = replicas
        self.is_sharded = is_sharded
        self.dtype = dtype
        self.steps = 0
        self._matrix_indices = [
            index for index, shard in enumerate(shard_ranges) if is_layer_matrix(shard.row)
        ]
        self._other_indices = [
            index for index, shard in enumerate(shard_ranges) if not is_layer_matrix(shard.row)
        ]
        self.shard_ranges, self.main_params = (
            self._select_matrices(shard_ranges),
            self._select_matrices(main_params),
        )
        self._buffers = [torch.zeros_like(main_param) for main_param in self.main_params]
        self._matrices = list(matrix_shards(self.shard_ranges, tp))
        other_ranges = [shard_ranges[index] for index in self._other_indices]
        # never empty: a stage with only the embedding has its range, every other stage has norms
        self._adamw = adamw_class(
            other_ranges, [main_params[index] for index in self._other_indices], betas=betas, eps=eps
        )

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> None:
        self._adamw.step([gradients[index] for index in self._other_indices], lr, weight_decay, decoupled_lr)
        self.steps += 1
        if not self.main_params:
            return
        matrix_gradients = self._select_matrices(gradients)
        torch._foreach_mul_(self._buffers, self.momentum)
        torch._foreach_add_(self._buffers, matrix_gradients)
        directions = list(
            torch._foreach_add(matrix_gradients, self._buffers, alpha=self.momentum)
        )  # Nesterov's
        torch._foreach_mul_(self.main_params, 1 - lr * weight_decay)
        group_size = self.replicas.size
        for first in range(0, len(self._matrices), group_size):
            group = self._matrices[first : first + group_size]
            for matrix, update in zip(group, self._orthogonalize_group(group, directions), strict=True):
                matrix.copy_from_full(update, directions[matrix.index])
        torch._foreach_add_(self.main_params, directions, alpha=-lr)

    def _orthogonalize_group(
        self, group: Sequence[MatrixShard], directions: Sequence[Tensor]
    ) -> list[Tensor]:
        """Compute the updates of up to as many matrices as there are replicas, at a learning rate of 1."""
        max_elements = max(matrix.size for matrix in group)
        rank = self.replicas.rank
        own_matrix = directions[0].new_zeros(max_elements)
        if self.is_sharded:
            all_matrices = own_matrix.new_zeros(self.replicas.size, max_elements)
            for matrix, full in zip(group, all_matrices, strict=False):
                matrix.copy_to_full(directions[matrix.index], full[: matrix.size].view(matrix.shape))
            self.replicas.reduce_scatter(own_matrix, all_matrices.view(-1)).wait()
        elif rank < len(group):
            group[rank].copy_to_full(
                directions[group[rank].index], own_matrix[: group[rank].size].view(group[rank].shape)
            )
        if rank < len(group):
            shape, size = group[rank].shape, group[rank].size
            self.tp.reduce(own_matrix[:size])
            scale = _ADAMW_RMS * math.sqrt(max(shape))
            own_matrix[:size] = (orthogonalize(own_matrix[:size].view(shape), self.dtype) * scale).reshape(-1)
        if self.replicas.size > 1:
            gathered = own_matrix.new_empty(self.replicas.size * max_elements)
            self.replicas.all_gather(gathered, own_matrix).wait()
        else:
            gathered = own_matrix
        return [
            flat[: matrix.size].view(matrix.shape)
            for matrix, flat in zip(group, gathered.view(-1, max_elements), strict=False)
        ]

    def state_shards(self) -> Iterator[tuple[str, ShardRange, Tensor]]:
        yield from self._adamw.state_shards()
        for shard, buffer in zip(self.shard_ranges, self._buffers, strict=True):
            yield MOMENTUM, shard, buffer

    @torch.no_grad()
    def load_state(self, load_shard: LoadShard, *, steps: int) -> None:
        self._adamw.load_state(load_shard, steps=steps)
        self.steps = steps
        for shard, buffer in zip(self.shard_ranges, self._buffers, strict=True):
            load_shard(MOMENTUM, shard, buffer)

    def _select_matrices(self, items: Sequence[T]) -> list[T]:
        return [items[index] for index in self._matrix_indices]
