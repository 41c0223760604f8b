"""Replicas that share gradients, and in ZeRO's stages 1 and 2 optimizer state, by buckets (arXiv:1910.02054).

Every parameter has a place in a bucket, the same for its weight, its gradient and its moments, and every
replica owns an equal stretch of every bucket. Replicas are the ranks that hold the same weights: those of dp,
and those that share a sequence.

| stage | a bucket's gradients are | kept by each replica |
|---|---|---|
| 0 | summed on all, once a step | all |
| 1 | summed, each stretch on its owner, once a step | weights and gradients; its stretches of the rest |
| 2 | the same, after every micro-batch | weights; its stretches of the rest |

Buckets go in the order of the backward pass and never overtake each other, so all replicas agree on whose
turn it is. Whether they go as they fill up or all at the end changes no bit of the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mega_model.build import parameters
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import AsyncTensor, Axis
from mega_model.runtime import Runtime
from mega_model.weight_gradients import WeightGradients
from mega_schema.params import Param
from mega_train.distributed.bucket_layout import Bucket, Place, Sharing, cut, places, share

Held = Sequence[tuple[Param, nn.Parameter]]


class Buckets:
    """The weights and gradients of one rank, stages 0 to 2 (a `grad_sync.Shards`).

    Attributes:
        held, models: as given.
    """

    def __init__(
        self,
        held: Held,
        replicas: Axis,
        gradients: WeightGradients,
        sharing: Sharing,
        *,
        alone: Collection[str] = (),
        models: Sequence[Decoder] = (),
    ) -> None:
        """
        Args:
            held: the parameters in the order of the forward pass. Their values move into buffers of ours.
            gradients: where the layers leave theirs; from now on in our buckets.
            alone: names of parameters that are cut alike on another pipeline stage.
            models: their units wait for the weights they need, where these are gathered meanwhile.
        """
        self.held, self.models = held, models
        rows, sizes = [row for row, _ in held], [weight.numel() for _, weight in held]
        single = [i for i, row in enumerate(rows) if (row.tied_to or row.name) in alone]
        self.sharded = sharing.stage > 0 and replicas.size > 1
        owners = (replicas.rank, replicas.size) if self.sharded else (0, 1)
        buckets = cut(sizes, most=sharing.bucket, replicas=owners[1], alone=single)
        placed = places(rows, sizes, buckets, *owners)
        self.stretches = [place.stretch for place in placed]
        self._weights = _Weights(held, placed, buckets, replicas, owners, overlap=sharing.overlap_gather)
        for model in models if self.sharded and sharing.overlap_gather else ():
            self._weights.wait_in(model)
        self.main = self._weights.main
        stage = sharing.stage if self.sharded else 0
        self._gradients = _Gradients(held, placed, buckets, replicas, owners, gradients, stage, sharing)

    @property
    def spoiled(self) -> bool:
        return self._gradients.spoiled

    def begin(self, micros: int) -> None:
        self._gradients.begin(micros)

    def reduce(self) -> list[Tensor]:
        return self._gradients.reduce()

    def publish(self) -> None:
        self._weights.publish()

    def settle(self) -> None:
        self._weights.settle()

    def local_weights(self) -> Iterator[Tensor]:
        return (weight.data for _, weight in self.held)


class _Weights:
    """Weights as views of buckets; main weights as views of the stretches a replica owns."""

    def __init__(
        self,
        held: Held,
        placed: Sequence[Place],
        buckets: Sequence[Bucket],
        replicas: Axis,
        owners: tuple[int, int],
        *,
        overlap: bool,
    ) -> None:
        self._replicas, self._overlap = replicas, overlap
        self._sharded = owners != (0, 1)
        self._bucket_of = {weight: place.bucket for (_, weight), place in zip(held, placed, strict=True)}
        self._coming: dict[int, AsyncTensor] = {}
        first = held[0][1]
        self._whole = [torch.zeros(b.length, dtype=first.dtype, device=first.device) for b in buckets]
        for (_, weight), place in zip(held, placed, strict=True):
            part = self._whole[place.bucket][place.begin : place.begin + weight.numel()]
            part.copy_(weight.detach().flatten())
            weight.data = part.view_as(weight)
        self._own = [whole[slice(*share(len(whole), *owners))] for whole in self._whole]
        self._main = [own if own.dtype == torch.float32 else own.float() for own in self._own]
        self.main = [_in(self._main, place) for place in placed]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights to the weights, and give every replica what the others own."""
        self.settle()
        for bucket in reversed(range(len(self._whole))):  # the first layers are needed first
            own = self._own[bucket]
            if self._main[bucket] is not own:
                own.copy_(self._main[bucket])
            if self._sharded:
                self._coming[bucket] = self._replicas.all_gather(self._whole[bucket], own)
                if not self._overlap:
                    self._wait([bucket])

    def settle(self) -> None:
        self._wait(range(len(self._whole)))

    def wait_in(self, model: Decoder) -> None:
        """Let each block, and what lies before and after them, wait for its own weights as it begins."""
        for unit in units(model):
            needed = sorted({self._bucket_of[weight] for weight in unit.parameters()}, reverse=True)
            unit.register_forward_pre_hook(lambda *_, needed=needed: self._wait(needed))

    def _wait(self, needed: Sequence[int]) -> None:
        for bucket in needed:
            if (coming := self._coming.pop(bucket, None)) is not None:
                coming.wait()


class _Gradients:
    """Gradients as views of buckets, and the sums of the stretches a replica owns."""

    def __init__(
        self,
        held: Held,
        placed: Sequence[Place],
        buckets: Sequence[Bucket],
        replicas: Axis,
        owners: tuple[int, int],
        gradients: WeightGradients,
        stage: int,
        sharing: Sharing,
    ) -> None:
        self._buckets, self._replicas, self._owners, self._stage = buckets, replicas, owners, stage
        self._device = held[0][1].device
        self._dtype = torch.bfloat16 if sharing.reduce_bf16 else torch.float32  # between replicas
        self._early = stage == 2 or sharing.overlap_reduce
        # waited for at once, or when the next one has gone, since it keeps room of its own, or at the end
        self._most_under_way = 0 if not sharing.overlap_reduce else 1 if stage == 2 else len(buckets)
        self._bucket_of = {weight: place.bucket for (_, weight), place in zip(held, placed, strict=True)}
        self._whole: list[Tensor | None] = [None] * len(buckets)
        if stage < 2:
            self._own = [self._buffer(b)[slice(*share(len(self._buffer(b)), *owners))] for b in self._numbers]
        else:
            self._own = [self._zeros(b.length // owners[1]) for b in buckets]
        self._of = [_in(self._own, place) for place in placed]
        self._ready = [0] * len(buckets)
        self._turns = self._turn = 0
        self._coming: list[tuple[int, AsyncTensor]] = []
        self._sums: list[Tensor] = []
        for (_, weight), place in zip(held, placed, strict=True):
            main = partial(self._view, place.bucket, place.begin, weight)
            gradients.register_main_grad(weight, main)
            weight.register_post_accumulate_grad_hook(partial(self._take, main))
        gradients.on_grad_ready = self._complete

    @property
    def _numbers(self) -> range:
        return range(len(self._buckets))

    @property
    def spoiled(self) -> bool:
        sums = torch.stack(self._sums) if self._sums else torch.stack([g.sum() for g in self._of])
        return not bool(sums.isfinite().all())

    def begin(self, micros: int) -> None:
        assert not self._coming
        for buffer in self._own if self._stage == 2 else self._whole:
            if buffer is not None:
                buffer.zero_()
        self._turns = len(self._buckets) * (micros if self._stage == 2 else 1)
        self._needed = [len(b.begins) * (1 if self._stage == 2 else micros) for b in self._buckets]
        self._ready, self._turn = [0] * len(self._buckets), 0
        self._sums.clear()

    def reduce(self) -> list[Tensor]:
        """Send what has not gone yet, and wait for all."""
        while self._turn < self._turns:
            self._send()
        while self._coming:
            self._receive()
        return self._of

    def _take(self, main: partial[Tensor], weight: nn.Parameter) -> None:
        """Autograd made a gradient of its own; a linear layer's went to `main` directly."""
        if weight.grad is not None:
            main().add_(weight.grad)
            weight.grad = None
            self._complete(weight)

    def _complete(self, weight: nn.Parameter) -> None:
        """The gradient of one micro-batch is in its bucket."""
        bucket = self._bucket_of[weight]
        self._ready[bucket] += 1
        flushes = self._turns // len(self._buckets)
        assert self._ready[bucket] <= self._needed[bucket] * flushes, "a gradient after its bucket had gone"
        while self._early and self._turn < self._turns and self._full():
            self._send()

    def _full(self) -> bool:
        """Whether the bucket whose turn it is has all that it waits for."""
        time, bucket = divmod(self._turn, len(self._buckets))
        return self._ready[bucket] >= self._needed[bucket] * (time + 1)

    def _send(self) -> None:
        bucket = self._turn % len(self._buckets)
        self._turn += 1
        if self._replicas.size == 1:
            return
        whole = self._buffer(bucket)
        self._sums.append(whole.sum())
        sent = whole.to(self._dtype)  # itself where it is float32 already
        if self._stage == 0:
            self._coming.append((bucket, self._replicas.all_reduce(sent)))
        elif self._stage == 1:
            own = self._own[bucket]
            into = own if sent is whole else torch.empty_like(own, dtype=self._dtype)
            self._coming.append((bucket, self._replicas.reduce_scatter(into, sent)))
        else:
            share_of_sum = torch.empty_like(self._own[bucket], dtype=self._dtype)
            self._coming.append((bucket, self._replicas.reduce_scatter(share_of_sum, sent)))
            self._whole[bucket] = None
        while len(self._coming) > self._most_under_way:
            self._receive()

    def _receive(self) -> None:
        bucket, coming = self._coming.pop(0)
        arrived = coming.wait()
        if self._stage == 2:
            self._own[bucket].add_(arrived)
        elif self._dtype != torch.float32:
            (self._buffer(bucket) if self._stage == 0 else self._own[bucket]).copy_(arrived)

    def _view(self, bucket: int, begin: int, weight: Tensor) -> Tensor:
        return self._buffer(bucket)[begin : begin + weight.numel()].view_as(weight)

    def _buffer(self, bucket: int) -> Tensor:
        whole = self._whole[bucket]
        if whole is None:
            whole = self._whole[bucket] = self._zeros(self._buckets[bucket].length)
        return whole

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, device=self._device)


def ordered_params(models: Sequence[Decoder], rt: Runtime) -> list[tuple[Param, nn.Parameter]]:
    """The parameters this rank holds, each with its table row, in the order of the forward pass."""
    order = {name: place for place, name in enumerate(rt.table)}
    held = (pair for model in models for pair in parameters(model, rt))
    return sorted(held, key=lambda pair: order[pair[0].name])


def units(model: Decoder) -> list[nn.Module]:
    """What a model is called by, one after another: the embeddings, each block, the norm, the head."""
    return [
        unit
        for child in model.children()
        for unit in (child.values() if isinstance(child, nn.ModuleDict) else (child,))
    ]


def _in(own: Sequence[Tensor], place: Place) -> Tensor:
    return own[place.bucket][place.own : place.own + place.stretch.size]
