"""Data parallelism and ZeRO stages 1 and 2, with flat buckets (arXiv:1910.02054).

Every parameter has a slot in a bucket, the same for its weight, its gradient and its moments, and every
replica owns an equal shard of every bucket. Replicas are the ranks that hold the same weights: those of dp,
and those of cp.

| stage | a bucket's gradients are | kept by each replica |
|---|---|---|
| 0 | all-reduced once a step | all |
| 1 | reduce-scattered once a step | weights and gradients; its shards of the rest |
| 2 | reduce-scattered after every micro-batch | weights; its shards of the rest |

Buckets are reduced in the order of the backward pass and never overtake each other, so all replicas agree on
the next one. Reducing them early or all at the end gives the same bits.
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
from mega_train.distributed.bucket_layout import (
    Bucket,
    ParamSlot,
    ShardingConfig,
    assign_buckets,
    param_slots,
    shard_range,
)

NamedParams = Sequence[tuple[Param, nn.Parameter]]


class BucketedDataParallel:
    """The weights and gradients of one rank in stages 0 to 2 (a `grad_sync.ShardingStrategy`).

    Attributes:
        params, models: as given.
    """

    def __init__(
        self,
        params: NamedParams,
        replicas: Axis,
        weight_gradients: WeightGradients,
        config: ShardingConfig,
        *,
        separate_names: Collection[str] = (),
        models: Sequence[Decoder] = (),
    ) -> None:
        """
        Args:
            params: the parameters in the order of the forward pass. Their values move into flat buffers.
            weight_gradients: accumulates the layers' weight gradients, from now on in the buckets.
            separate_names: names of parameters that are sharded alike on another pipeline stage.
            models: with overlapping gathers, their units wait for the weights they need.
        """
        self.params = params
        self.models = models
        rows, sizes = [row for row, _ in params], [weight.numel() for _, weight in params]
        separate = [i for i, row in enumerate(rows) if (row.tied_to or row.name) in separate_names]
        self.is_sharded = config.stage > 0 and replicas.size > 1
        owners = (replicas.rank, replicas.size) if self.is_sharded else (0, 1)
        buckets = assign_buckets(
            sizes, max_elements=config.bucket_elements, replicas=owners[1], separate=separate
        )
        slots = param_slots(rows, sizes, buckets, *owners)
        self.shard_ranges = [slot.shard for slot in slots]
        self._weights = _WeightBuckets(
            params, slots, buckets, replicas, owners, overlap=config.overlap_gather
        )
        for model in models if self.is_sharded and config.overlap_gather else ():
            self._weights.add_gather_hooks(model)
        self.main_params = self._weights.main_params
        stage = config.stage if self.is_sharded else 0
        self._grads = _GradientBuckets(
            params, slots, buckets, replicas, owners, weight_gradients, stage, config
        )

    @property
    def has_local_non_finite(self) -> bool:
        return self._grads.has_local_non_finite

    def zero_grad(self, num_micro_batches: int) -> None:
        self._grads.zero_grad(num_micro_batches)

    def reduce(self) -> list[Tensor]:
        return self._grads.reduce()

    def copy_main_to_model_params(self) -> None:
        self._weights.copy_main_to_model_params()

    def wait_all_gather(self) -> None:
        self._weights.wait_all_gather()

    def local_weights(self) -> Iterator[Tensor]:
        return (weight.data for _, weight in self.params)


class _WeightBuckets:
    """Weights as views of buckets; main weights as views of this replica's shards."""

    def __init__(
        self,
        params: NamedParams,
        slots: Sequence[ParamSlot],
        buckets: Sequence[Bucket],
        replicas: Axis,
        owners: tuple[int, int],
        *,
        overlap: bool,
    ) -> None:
        self._replicas = replicas
        self._overlap = overlap
        self._sharded = owners != (0, 1)
        self._bucket_of = {weight: slot.bucket for (_, weight), slot in zip(params, slots, strict=True)}
        self._pending: dict[int, AsyncTensor] = {}
        first = params[0][1]
        self._flat = [
            torch.zeros(bucket.length, dtype=first.dtype, device=first.device) for bucket in buckets
        ]
        for (_, weight), slot in zip(params, slots, strict=True):
            view = self._flat[slot.bucket][slot.offset : slot.offset + weight.numel()]
            view.copy_(weight.detach().flatten())
            weight.data = view.view_as(weight)
        self._shards = [flat[slice(*shard_range(len(flat), *owners))] for flat in self._flat]
        self._main_shards = [
            shard if shard.dtype == torch.float32 else shard.float() for shard in self._shards
        ]
        self.main_params = [_shard_view(self._main_shards, slot) for slot in slots]

    @torch.no_grad()
    def copy_main_to_model_params(self) -> None:
        """Round the main weights into the model's weights, and all-gather them over the replicas."""
        self.wait_all_gather()
        for bucket in reversed(range(len(self._flat))):  # the first layers are needed first
            shard = self._shards[bucket]
            if self._main_shards[bucket] is not shard:
                shard.copy_(self._main_shards[bucket])
            if self._sharded:
                self._pending[bucket] = self._replicas.all_gather(self._flat[bucket], shard)
                if not self._overlap:
                    self._wait([bucket])

    def wait_all_gather(self) -> None:
        self._wait(range(len(self._flat)))

    def add_gather_hooks(self, model: Decoder) -> None:
        """Make each unit of the model wait for its weights when its forward pass starts."""
        for unit in fsdp_units(model):
            needed = sorted({self._bucket_of[weight] for weight in unit.parameters()}, reverse=True)
            unit.register_forward_pre_hook(lambda *_, needed=needed: self._wait(needed))

    def _wait(self, needed: Sequence[int]) -> None:
        for bucket in needed:
            if (pending := self._pending.pop(bucket, None)) is not None:
                pending.wait()


class _GradientBuckets:
    """Gradients as views of buckets, and the reduced gradients of this replica's shards."""

    def __init__(
        self,
        params: NamedParams,
        slots: Sequence[ParamSlot],
        buckets: Sequence[Bucket],
        replicas: Axis,
        owners: tuple[int, int],
        weight_gradients: WeightGradients,
        stage: int,
        config: ShardingConfig,
    ) -> None:
        self._buckets = buckets
        self._replicas = replicas
        self._owners = owners
        self._stage = stage
        self._device = params[0][1].device
        self._dtype = torch.bfloat16 if config.reduce_bf16 else torch.float32  # between replicas
        self._reduces_early = stage == 2 or config.overlap_reduce
        # 0 waits at once; 1 after the next launch, as each reduction of stage 2 holds a buffer; else at the
        # end
        self._max_pending = 0 if not config.overlap_reduce else 1 if stage == 2 else len(buckets)
        self._bucket_of = {weight: slot.bucket for (_, weight), slot in zip(params, slots, strict=True)}
        self._flat: list[Tensor | None] = [None] * len(buckets)
        if stage < 2:
            self._shards = [
                self._buffer(bucket)[slice(*shard_range(len(self._buffer(bucket)), *owners))]
                for bucket in self._bucket_numbers
            ]
        else:
            self._shards = [self._zeros(bucket.length // owners[1]) for bucket in buckets]
        self._param_shards = [_shard_view(self._shards, slot) for slot in slots]
        self._ready_counts = [0] * len(buckets)
        self._total_turns = self._turn = 0
        self._pending: list[tuple[int, AsyncTensor]] = []
        self._local_sums: list[Tensor] = []
        for (_, weight), slot in zip(params, slots, strict=True):
            main_grad = partial(self._gradient_view, slot.bucket, slot.offset, weight)
            weight_gradients.register_main_grad(weight, main_grad)
            weight.register_post_accumulate_grad_hook(partial(self._accumulate, main_grad))
        weight_gradients.on_grad_ready = self._mark_ready

    @property
    def _bucket_numbers(self) -> range:
        return range(len(self._buckets))

    @property
    def has_local_non_finite(self) -> bool:
        sums = (
            torch.stack(self._local_sums)
            if self._local_sums
            else torch.stack([g.sum() for g in self._param_shards])
        )
        return not bool(sums.isfinite().all())

    def zero_grad(self, num_micro_batches: int) -> None:
        assert not self._pending
        for buffer in self._shards if self._stage == 2 else self._flat:
            if buffer is not None:
                buffer.zero_()
        self._total_turns = len(self._buckets) * (num_micro_batches if self._stage == 2 else 1)
        self._needed_counts = [
            len(b.param_offsets) * (1 if self._stage == 2 else num_micro_batches) for b in self._buckets
        ]
        self._ready_counts, self._turn = [0] * len(self._buckets), 0
        self._local_sums.clear()

    def reduce(self) -> list[Tensor]:
        """Launch the remaining reductions and wait for all."""
        while self._turn < self._total_turns:
            self._launch_reduction()
        while self._pending:
            self._finish_reduction()
        return self._param_shards

    def _accumulate(self, main_grad: partial[Tensor], weight: nn.Parameter) -> None:
        """Add a gradient that autograd computed; linear layers write to `main_grad` directly."""
        if weight.grad is not None:
            main_grad().add_(weight.grad)
            weight.grad = None
            self._mark_ready(weight)

    def _mark_ready(self, weight: nn.Parameter) -> None:
        """Count a parameter's gradient of one micro-batch, and reduce the buckets that are complete."""
        bucket = self._bucket_of[weight]
        self._ready_counts[bucket] += 1
        flushes = self._total_turns // len(self._buckets)
        assert self._ready_counts[bucket] <= self._needed_counts[bucket] * flushes, (
            "a gradient after its bucket had gone"
        )
        while self._reduces_early and self._turn < self._total_turns and self._is_next_ready():
            self._launch_reduction()

    def _is_next_ready(self) -> bool:
        """Whether the next bucket to be reduced has all its gradients."""
        round_number, bucket = divmod(self._turn, len(self._buckets))
        return self._ready_counts[bucket] >= self._needed_counts[bucket] * (round_number + 1)

    def _launch_reduction(self) -> None:
        bucket = self._turn % len(self._buckets)
        self._turn += 1
        if self._replicas.size == 1:
            return
        flat = self._buffer(bucket)
        self._local_sums.append(flat.sum())
        sent_flat = flat.to(self._dtype)  # itself where it is float32 already
        if self._stage == 0:
            self._pending.append((bucket, self._replicas.all_reduce(sent_flat)))
        elif self._stage == 1:
            shard = self._shards[bucket]
            output = shard if sent_flat is flat else torch.empty_like(shard, dtype=self._dtype)
            self._pending.append((bucket, self._replicas.reduce_scatter(output, sent_flat)))
        else:
            share_of_sum = torch.empty_like(self._shards[bucket], dtype=self._dtype)
            self._pending.append((bucket, self._replicas.reduce_scatter(share_of_sum, sent_flat)))
            self._flat[bucket] = None
        while len(self._pending) > self._max_pending:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        bucket, pending = self._pending.pop(0)
        received = pending.wait()
        if self._stage == 2:
            self._shards[bucket].add_(received)
        elif self._dtype != torch.float32:
            (self._buffer(bucket) if self._stage == 0 else self._shards[bucket]).copy_(received)

    def _gradient_view(self, bucket: int, offset: int, weight: Tensor) -> Tensor:
        return self._buffer(bucket)[offset : offset + weight.numel()].view_as(weight)

    def _buffer(self, bucket: int) -> Tensor:
        flat = self._flat[bucket]
        if flat is None:
            flat = self._flat[bucket] = self._zeros(self._buckets[bucket].length)
        return flat

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, device=self._device)


def ordered_params(models: Sequence[Decoder], rt: Runtime) -> list[tuple[Param, nn.Parameter]]:
    """List this rank's parameters, each with its row of the parameter table, in the order of the forward
    pass.
    """
    order = {name: position for position, name in enumerate(rt.table)}
    pairs = (pair for model in models for pair in parameters(model, rt))
    return sorted(pairs, key=lambda pair: order[pair[0].name])


def fsdp_units(model: Decoder) -> list[nn.Module]:
    """List the modules that a model calls in turn: the embeddings, each block, the norm, the head."""
    return [
        unit
        for child in model.children()
        for unit in (child.values() if isinstance(child, nn.ModuleDict) else (child,))
    ]


def _shard_view(shards: Sequence[Tensor], slot: ParamSlot) -> Tensor:
    return shards[slot.bucket][slot.shard_offset : slot.shard_offset + slot.shard.size]
