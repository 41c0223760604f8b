"""Search the layouts of a model on a number of GPUs for the fastest ones that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from mega_schema.errors import MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import KEEP_ALL, RecomputePolicy
from mega_schema.spec import ModelSpec
from mega_train.config.parallel import ScheduleName
from mega_train.planning.estimate import Estimate, estimate
from mega_train.planning.hardware import Hardware
from mega_train.planning.memory import peak_rank
from mega_train.planning.sharded_sizes import ParamShares, ShardedModel, Stages, stages_by_rank
from mega_train.planning.workload import Workload


def search(template: Workload, world: int, hardware: Hardware, *, limit: int = 10) -> list[Estimate]:
    """Search the fastest layouts that fit for a model and batch, fastest first.

    Tried are all tp of a node, all pp, vp and cp, micro-batches that divide the batch, and 1F1B and
    zero-bubble, with sequence parallelism, a sharded optimizer and overlapped transfers, which cost nothing.
    The least recomputation that fits is chosen. ZeRO 2 and 3 are not tried: with a pipeline they send more
    than they save.

    Args:
        template: its layout, micro-batch, recomputation and ZeRO stage are ignored.
    """
    estimates = [
        estimate(fitting, hardware)
        for workload in list_layouts(template, world, hardware.node)
        if (fitting := _least_recompute(workload, hardware.memory))
    ]
    return sorted(estimates, key=lambda e: e.seconds.step)[:limit]


def variants(workload: Workload, hardware: Hardware) -> list[Estimate]:
    """Estimate the micro-batch sizes and numbers of virtual stages that fit, with the least recomputation."""
    layout = workload.layout
    candidates = _batch_variants(workload, layout, workload.model.shares, (workload.schedule,), {})
    return [
        estimate(fitting, hardware)
        for candidate in candidates
        if (fitting := _least_recompute(candidate, hardware.memory))
    ]


def list_layouts(template: Workload, world: int, node: int) -> Iterator[Workload]:
    """Yield every way to divide the model and the batch over `world` ranks."""
    shares = _param_shares(template.spec, divisors(world, node))
    depths: dict[tuple[int, int], tuple[Stages, ...]] = {}
    for layout in _list_meshes(world, tuple(shares), template.spec.layers, node):
        yield from _batch_variants(template, layout, shares[layout.tp], ("1f1b", "zero-bubble"), depths)


def _batch_variants(
    template: Workload,
    layout: Layout,
    shares: ParamShares,
    schedules: Sequence[ScheduleName],
    depths: dict[tuple[int, int], tuple[Stages, ...]],
) -> Iterator[Workload]:
    """Yield every micro-batch size and number of virtual stages on this layout.

    Args:
        schedules: pipeline schedules.
        depths: cache of `stages_by_rank`, by pp and vp; extended here.
    """
    if template.global_batch_size % layout.dp or (layout.cp > 1 and template.seq_length % (2 * layout.cp)):
        return
    for micro in divisors(template.global_batch_size // layout.dp):
        micros = template.global_batch_size // (layout.dp * micro)
        if micro * template.seq_length // layout.cp % layout.tp:
            continue
        interleaves = layout.pp > 1 and micros % layout.pp == 0
        layers_per_stage, remainder = divmod(template.spec.layers, layout.pp)
        for vp in divisors(layers_per_stage) if interleaves and not remainder else (1,):
            key = layout.pp, vp
            depths[key] = depths.get(key) or stages_by_rank(template.spec.layers, Layout(pp=layout.pp, vp=vp))
            model = ShardedModel(template.spec, dataclasses.replace(layout, vp=vp), shares, depths[key])
            zero = 1 if layout.dp * layout.cp > 1 else 0
            workload = dataclasses.replace(
                template, model=model, micro_batch_size=micro, sequence=layout.tp > 1, zero=zero
            )
            for schedule in schedules if layout.pp > 1 else schedules[:1]:
                yield dataclasses.replace(workload, schedule=schedule)


def _param_shares(spec: ModelSpec, degrees: Sequence[int]) -> Mapping[int, ParamShares]:
    """Compute one rank's shard of the model for every tensor-parallel degree that divides it."""
    shares_by_tp = {}
    for tp in degrees:
        try:
            shares_by_tp[tp] = ParamShares.from_spec(spec, tp)
        except MegaError:
            continue  # heads or feed-forward do not divide by this tp
    return shares_by_tp


def _list_meshes(world: int, degrees: Sequence[int], layers: int, node: int) -> Iterator[Layout]:
    for tp in degrees:
        for cp in divisors(world // tp, node):
            for pp in divisors(world // (tp * cp), layers):
                yield Layout(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp))


def _least_recompute(workload: Workload, memory: float) -> Workload | None:
    """Return the workload with the least recomputation that fits.

    The order is: none, attention, the fewest layers of a stage.
    """
    for policy in (KEEP_ALL, RecomputePolicy("selective")):
        if (candidate := _if_it_fits(workload, policy, memory)) is not None:
            return candidate
    low = 1
    fewest_fitting = max(len(stage.layers) for stages in workload.model.stages for stage in stages)
    if (smallest := _if_it_fits(workload, _block_recompute(fewest_fitting), memory)) is None:
        return None
    while low < fewest_fitting:
        middle = (low + fewest_fitting) // 2
        if (candidate := _if_it_fits(workload, _block_recompute(middle), memory)) is not None:
            smallest = candidate
            fewest_fitting = middle
        else:
            low = middle + 1
    return smallest


def _block_recompute(layers: int) -> RecomputePolicy:
    return RecomputePolicy("full", "block", layers)


def _if_it_fits(workload: Workload, recompute: RecomputePolicy, memory: float) -> Workload | None:
    candidate = dataclasses.replace(workload, recompute=recompute)
    return candidate if peak_rank(candidate).total <= memory else None


def divisors(n: int, largest: int | None = None) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(n, largest or n) + 1) if n % d == 0)
