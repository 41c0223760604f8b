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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class BucketedParams:
    """The parameters of a rank, and the slot of each in a bucket.

    Attributes:
        params: the parameters in the order of the forward pass.
        is_sharded: whether each replica owns a shard of every bucket; otherwise each owns everything.
    """

    params: NamedParams
    replicas: Axis
    buckets: Sequence[Bucket]
    slots: Sequence[ParamSlot]
    is_sharded: bool

    @classmethod
    def assign(
        cls,
        params: NamedParams,
        replicas: Axis,
        config: ShardingConfig,
        separate_names: Collection[str] = (),
    ) -> BucketedParams:
        """Assign parameters to buckets.

        Args:
            separate_names: names of parameters that are sharded alike on another pipeline stage.
        """
        rows, sizes = [row for row, _ in params], [weight.numel() for _, weight in params]
        separate = [i for i, row in enumerate(rows) if (row.tied_to or row.name) in separate_names]
        is_sharded = config.stage > 0 and replicas.size > 1
        rank, owners = (replicas.rank, replicas.size) if is_sharded else (0, 1)
        buckets = assign_buckets(
            sizes, max_elements=config.bucket_elements, replicas=owners, separate=separate
        )
        slots = param_slots(rows, sizes, buckets, rank, owners)
        return cls(params, replicas, buckets, slots, is_sharded)

    @property
    def bucket_of(self) -> dict[nn.Parameter, int]:
        """The number of each parameter's bucket."""
        return {weight: slot.bucket for (_, weight), slot in zip(self.params, self.slots, strict=True)}

    def own_shard(self, flat: Tensor) -> Tensor:
        """Return the view of this replica's shard of a bucket."""
        rank, owners = (self.replicas.rank, self.replicas.size) if self.is_sharded else (0, 1)
        return flat[slice(*shard_range(len(flat), rank, owners))]

    def param_shards(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the views of each parameter's range in this replica's shards of the buckets."""
        return [
            shards[slot.bucket][slot.shard_offset : slot.shard_offset + slot.shard.size]
            for slot in self.slots
        ]


class WeightBuckets:
    """Weights as views of buckets; main weights as views of this replica's shards.

    A `grad_sync.ShardedWeights`.
    """

    def __init__(
        self, bucketed: BucketedParams, models: Sequence[Decoder] = (), *, overlap: bool = False
    ) -> None:
        """Move the weights of a rank into buckets.

        Args:
            bucketed: the values of its parameters move into flat buffers.
            overlap: whether weights are gathered while the next forward pass runs; units of `models` then
                wait for the weights they need.
        """
        self.params = bucketed.params
        self.models = models
        self.is_sharded = bucketed.is_sharded
        self.shard_ranges = [slot.shard for slot in bucketed.slots]
        self._replicas = bucketed.replicas
        self._overlap = overlap
        self._bucket_of = bucketed.bucket_of
        self._pending: dict[int, AsyncTensor] = {}
        first = self.params[0][1]
        self._flat = [
            torch.zeros(bucket.length, dtype=first.dtype, device=first.device) for bucket in bucketed.buckets
        ]
        for (_, weight), slot in zip(self.params, bucketed.slots, strict=True):
            view = self._flat[slot.bucket][slot.offset : slot.offset + weight.numel()]
            view.copy_(weight.detach().flatten())
            weight.data = view.view_as(weight)
        self._shards = [bucketed.own_shard(flat) for flat in self._flat]
        self._main_shards = [
            shard if shard.dtype == torch.float32 else shard.float() for shard in self._shards
        ]
        self.main_params = bucketed.param_shards(self._main_shards)
        for model in models if self.is_sharded and overlap else ():
            self._add_gather_hooks(model)

    @torch.no_grad()
    def copy_main_to_model_params(self) -> None:
        """Round the main weights into the model's weights, and all-gather them over the replicas."""
        self.wait_all_gather()
        for bucket in reversed(range(len(self._flat))):  # the first layers are needed first
            shard = self._shards[bucket]
            if self._main_shards[bucket] is not shard:
                shard.copy_(self._main_shards[bucket])
            if self.is_sharded:
                self._pending[bucket] = self._replicas.all_gather(self._flat[bucket], shard)
                if not self._overlap:
                    self._wait([bucket])

    def wait_all_gather(self) -> None:
        self._wait(range(len(self._flat)))

    def local_weights(self) -> Iterator[Tensor]:
        return (weight.data for _, weight in self.params)

    def _add_gather_hooks(self, model: Decoder) -> None:
        """Make each unit of the model wait for its weights when its forward pass starts."""
        for unit in fsdp_units(model):
            needed = sorted({self._bucket_of[weight] for weight in unit.parameters()}, reverse=True)
            unit.register_forward_pre_hook(lambda *_, needed=needed: self._wait(needed))

    def _wait(self, needed: Sequence[int]) -> None:
        for bucket in needed:
            if (pending := self._pending.pop(bucket, None)) is not None:
                pending.wait()


class GradientBuckets:
    """Gradients as views of buckets, and this replica's shards of the reduced gradients.

    A `grad_sync.ShardedGradients`.
    """

    def __init__(
        self, bucketed: BucketedParams, weight_gradients: WeightGradients, config: ShardingConfig
    ) -> None:
        """Allocate the gradient buckets of a rank.

        Args:
            weight_gradients: accumulates the layers' weight gradients, from now on in the buckets.
        """
        self._buckets = bucketed.buckets
        self._replicas = bucketed.replicas
        self._stage = config.stage if bucketed.is_sharded else 0
        self._device = bucketed.params[0][1].device
        self._dtype = torch.bfloat16 if config.reduce_bf16 else torch.float32  # between replicas
        self._reduces_early = self._stage == 2 or config.overlap_reduce
        # 0 waits at once; 1 after the next launch, as each reduction of stage 2 holds a buffer; else at the
        # end
        self._max_pending = 0 if not config.overlap_reduce else 1 if self._stage == 2 else len(self._buckets)
        self._bucket_of = bucketed.bucket_of
        self._flat: list[Tensor | None] = [None] * len(self._buckets)
        if self._stage < 2:
            self._shards = [bucketed.own_shard(self._buffer(bucket)) for bucket in self._bucket_numbers]
        else:
            self._shards = [self._zeros(bucket.length // self._replicas.size) for bucket in self._buckets]
        self._param_shards = bucketed.param_shards(self._shards)
        self._ready_counts = [0] * len(self._buckets)
        self._total_turns = self._turn = 0
        self._pending: list[tuple[int, AsyncTensor]] = []
        self._local_sums: list[Tensor] = []
        for (_, weight), slot in zip(bucketed.params, bucketed.slots, strict=True):
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
        self._ready_counts = [0] * len(self._buckets)
        self._turn = 0
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
        sent_flat = flat.to(self._dtype)  # no copy if it is float32
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


def build_buckets(
    params: NamedParams,
    replicas: Axis,
    weight_gradients: WeightGradients,
    config: ShardingConfig,
    *,
    separate_names: Collection[str] = (),
    models: Sequence[Decoder] = (),
) -> tuple[WeightBuckets, GradientBuckets]:
    """Build the buckets of the weights and gradients of one rank in stages 0 to 2.

    Args:
        params: the parameters in the order of the forward pass. Their values move into flat buffers.
        weight_gradients: accumulates the layers' weight gradients, from now on in the buckets.
        separate_names: names of parameters that are sharded alike on another pipeline stage.
        models: with overlapping gathers, their units wait for the weights they need.
    """
    bucketed = BucketedParams.assign(params, replicas, config, separate_names)
    weights = WeightBuckets(bucketed, models, overlap=config.overlap_gather)
    return weights, GradientBuckets(bucketed, weight_gradients, config)


def ordered_params(models: Sequence[Decoder], rt: Runtime) -> list[tuple[Param, nn.Parameter]]:
    """List this rank's parameters with their rows of the table, in the order of the forward pass."""
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
