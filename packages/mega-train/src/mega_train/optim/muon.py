"""Muon: matrices move by their orthogonalised momentum, the rest by AdamW (Jordan 2024, arXiv:2502.16982).

A step needs a layer's matrices whole, and a rank keeps stretches of shares of them. So they are put together
and taken apart again around the Newton-Schulz iteration: over tp by a sum, over the replicas that share the
optimizer's state by one exchange each way, in which every replica gets another matrix to work on. Queries,
keys and values are matrices of their own, and so are gate and up: fusing them is for speed. Layout changes
nothing but the order of sums.
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
from mega_train.distributed.bucket_layout import Stretch
from mega_train.optim.adamw import MOMENTUM, AdamW, Fill

T = TypeVar("T")
ROUNDS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at zero, and from there within 0.7 to 1.2 (Jordan 2024)
_LIKE_ADAM = 0.2  # root mean square of AdamW's usual update (arXiv:2502.16982 §2.2)


def orthogonalized(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """U f(S) Vᵀ of U S Vᵀ, f five times a quintic that takes every singular value near 1; in `dtype`."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True, slots=True)
class Matrix:
    """One run of a parameter, such as its queries.

    Attributes:
        number: of the stretch that this rank keeps of the parameter.
        brought: what this rank answers for, over tp and over the replicas every element once.
        held: what it keeps, as others may too.
    """

    shape: tuple[int, int]
    number: int
    brought: tuple[FlatFragment, ...]
    held: tuple[FlatFragment, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def put(self, stretch: Tensor, whole: Tensor) -> None:
        """Copy what this rank answers for into the whole matrix."""
        for part in self.brought:
            whole[part.slab.in_global] = stretch[part.in_range].view(part.block)[part.slab.in_local]

    def take(self, whole: Tensor, stretch: Tensor) -> None:
        """Copy this rank's part of the whole matrix."""
        for part in self.held:
            stretch[part.in_range].view(part.block)[part.slab.in_local] = whole[part.slab.in_global]


def matrices(stretches: Sequence[Stretch], tp: Axis) -> Iterator[Matrix]:
    """The matrices that these stretches are parts of, the same on every rank of tp and every replica."""
    for number, stretch in enumerate(stretches):
        row = stretch.row
        rows, columns = row.shape
        runs = row.split.blocks if row.split and row.split.blocks else (rows,)
        shape, ends = row.local_shape(tp.size), (stretch.begin, stretch.end)
        brought = list(fragments(row.saved_boxes(tp.rank, tp.size), shape, *ends))
        held = list(fragments(row.slabs(tp.rank, tp.size), shape, *ends))
        begin = 0
        for run in runs:
            within = (begin, begin + run)
            yield Matrix((run, columns), number, tuple(_of(brought, *within)), tuple(_of(held, *within)))
            begin += run


def _of(parts: Sequence[FlatFragment], begin: int, end: int) -> Iterator[FlatFragment]:
    """The parts within a run of rows, counted from its first; a box is never of two runs."""
    for part in parts:
        top, *rest = part.slab.start
        if begin <= top < end:
            yield replace(part, slab=Slab((top - begin, *rest), part.slab.shape, part.slab.local_start))


class Muon:
    """Muon for matrices of layers, AdamW for all else; weight decay is decoupled in both.

    The update of a matrix is scaled to the root mean square of AdamW's, so that one learning rate and one
    weight decay are for both.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        main: Sequence[Tensor],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        tp: Axis,
        replicas: Axis,
        sharded: bool,
        dtype: torch.dtype,
        adam: type[AdamW] = AdamW,
    ) -> None:
        """
        Args:
            sharded: replicas keep different stretches; else each of them keeps all.
            dtype: of the Newton-Schulz iteration.
            adam: whose AdamW.
        """
        self.momentum, self.tp, self.replicas, self.sharded = momentum, tp, replicas, sharded
        self.dtype, self.steps = dtype, 0
        self._ours = [number for number, stretch in enumerate(stretches) if is_layer_matrix(stretch.row)]
        self._rest = [number for number, stretch in enumerate(stretches) if not is_layer_matrix(stretch.row)]
        self.stretches, self.main = self._mine(stretches), self._mine(main)
        self._buffers = [torch.zeros_like(each) for each in self.main]
        self._matrices = list(matrices(self.stretches, tp))
        rest = [stretches[number] for number in self._rest]
        # of a stage of its own, an embedding has a stretch; every other stage has norms
        self._adam = adam(rest, [main[number] for number in self._rest], betas=betas, eps=eps)

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], rate: float, weight_decay: float, ends: float | None = None
    ) -> None:
        self._adam.step([gradients[number] for number in self._rest], rate, weight_decay, ends)
        self.steps += 1
        if not self.main:
            return
        mine = self._mine(gradients)
        torch._foreach_mul_(self._buffers, self.momentum)
        torch._foreach_add_(self._buffers, mine)
        directions = list(torch._foreach_add(mine, self._buffers, alpha=self.momentum))  # Nesterov's
        torch._foreach_mul_(self.main, 1 - rate * weight_decay)
        each = self.replicas.size
        for first in range(0, len(self._matrices), each):
            some = self._matrices[first : first + each]
            for matrix, moved in zip(some, self._moved(some, directions), strict=True):
                matrix.take(moved, directions[matrix.number])
        torch._foreach_add_(self.main, directions, alpha=-rate)

    def _moved(self, some: Sequence[Matrix], directions: Sequence[Tensor]) -> list[Tensor]:
        """What is taken off each of as many matrices as there are replicas, or fewer, at a rate of 1."""
        room = max(matrix.size for matrix in some)
        place = self.replicas.rank
        mine = directions[0].new_zeros(room)
        if self.sharded:
            all_of_them = mine.new_zeros(self.replicas.size, room)
            for matrix, whole in zip(some, all_of_them, strict=False):
                matrix.put(directions[matrix.number], whole[: matrix.size].view(matrix.shape))
            self.replicas.reduce_scatter(mine, all_of_them.view(-1)).wait()
        elif place < len(some):
            some[place].put(directions[some[place].number], mine[: some[place].size].view(some[place].shape))
        if place < len(some):
            shape, size = some[place].shape, some[place].size
            self.tp.reduce(mine[:size])
            scale = _LIKE_ADAM * math.sqrt(max(shape))
            mine[:size] = (orthogonalized(mine[:size].view(shape), self.dtype) * scale).reshape(-1)
        if self.replicas.size > 1:
            every = mine.new_empty(self.replicas.size * room)
            self.replicas.all_gather(every, mine).wait()
        else:
            every = mine
        return [
            of[: matrix.size].view(matrix.shape)
            for matrix, of in zip(some, every.view(-1, room), strict=False)
        ]

    def state(self) -> Iterator[tuple[str, Stretch, Tensor]]:
        yield from self._adam.state()
        for stretch, buffer in zip(self.stretches, self._buffers, strict=True):
            yield MOMENTUM, stretch, buffer

    @torch.no_grad()
    def load(self, fill: Fill, *, steps: int) -> None:
        self._adam.load(fill, steps=steps)
        self.steps = steps
        for stretch, buffer in zip(self.stretches, self._buffers, strict=True):
            fill(MOMENTUM, stretch, buffer)

    def _mine(self, of: Sequence[T]) -> list[T]:
        return [of[number] for number in self._ours]
