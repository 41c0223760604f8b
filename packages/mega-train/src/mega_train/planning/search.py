"""Which layouts of a model on so many GPUs fit, and which of them are fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from mega_schema.errors import MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import KEEP_ALL, RecomputePolicy
from mega_schema.spec import ModelSpec
from mega_train.planning.estimate import Estimate, estimate
from mega_train.planning.hardware import Hardware
from mega_train.planning.memory import fullest
from mega_train.planning.sharded_sizes import Cut, Shares, Stages, stages
from mega_train.planning.workload import Job, Schedule


def search(job: Job, world: int, hardware: Hardware, *, most: int = 10) -> list[Estimate]:
    """The fastest ways to run this job's model and batch that fit, fastest first.

    Tried are all tp of a node, all pp, vp and cp, micro-batches that divide, and 1F1B and zero-bubble, with
    sequence parallelism, the optimizer's state shared out and transfers hidden, which cost nothing. Of
    recomputation the least that fits is taken. ZeRO 2 and 3 are not tried: beside a pipeline they send more
    than they save.

    Args:
        job: its cut, micro-batch, recomputation and ZeRO stage do not matter.
    """
    found = [
        estimate(fit, hardware)
        for made in layouts(job, world, hardware.node)
        if (fit := _fitting(made, hardware.memory))
    ]
    return sorted(found, key=lambda e: e.seconds.step)[:most]


def alike(job: Job, hardware: Hardware) -> list[Estimate]:
    """This job with every micro-batch and number of virtual stages that fits, least recomputation first."""
    layout = job.layout
    made = _batches(job, layout, job.cut.shares, (job.schedule,), {})
    return [estimate(fit, hardware) for each in made if (fit := _fitting(each, hardware.memory))]


def layouts(job: Job, world: int, node: int) -> Iterator[Job]:
    """Every way to cut the model and the batch over `world` ranks."""
    shares = _shares(job.spec, divisors(world, node))
    depths: dict[tuple[int, int], tuple[Stages, ...]] = {}
    for layout in _meshes(world, tuple(shares), job.spec.layers, node):
        yield from _batches(job, layout, shares[layout.tp], ("1f1b", "zero-bubble"), depths)


def _batches(
    job: Job,
    layout: Layout,
    shares: Shares,
    schedules: Sequence[Schedule],
    depths: dict[tuple[int, int], tuple[Stages, ...]],
) -> Iterator[Job]:
    """Every micro-batch and number of virtual stages on this mesh.

    Args:
        schedules: orders of a pipeline's passes.
        depths: what `stages` gave so far, by pp and vp; added to.
    """
    if job.global_samples % layout.dp or (layout.cp > 1 and job.length % (2 * layout.cp)):
        return
    for micro in divisors(job.global_samples // layout.dp):
        micros = job.global_samples // (layout.dp * micro)
        if micro * job.length // layout.cp % layout.tp:
            continue
        interleaves = layout.pp > 1 and micros % layout.pp == 0
        whole, rest = divmod(job.spec.layers, layout.pp)
        for vp in divisors(whole) if interleaves and not rest else (1,):
            key = layout.pp, vp
            depths[key] = depths.get(key) or stages(job.spec.layers, Layout(pp=layout.pp, vp=vp))
            cut = Cut(job.spec, dataclasses.replace(layout, vp=vp), shares, depths[key])
            zero = 1 if layout.dp * layout.cp > 1 else 0
            made = dataclasses.replace(job, cut=cut, micro=micro, sequence=layout.tp > 1, zero=zero)
            for schedule in schedules if layout.pp > 1 else schedules[:1]:
                yield dataclasses.replace(made, schedule=schedule)


def _shares(spec: ModelSpec, degrees: Sequence[int]) -> Mapping[int, Shares]:
    """The model's share of one rank for every tensor-parallel degree that divides it."""
    found = {}
    for tp in degrees:
        try:
            found[tp] = Shares.of(spec, tp)
        except MegaError:
            continue  # its heads or its feed-forward cannot be cut so
    return found


def _meshes(world: int, degrees: Sequence[int], layers: int, node: int) -> Iterator[Layout]:
    for tp in degrees:
        for cp in divisors(world // tp, node):
            for pp in divisors(world // (tp * cp), layers):
                yield Layout(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp))


def _fitting(job: Job, memory: float) -> Job | None:
    """The job with as little computed again as fits: nothing, attention, the fewest layers of a stage."""
    for some in (KEEP_ALL, RecomputePolicy("selective")):
        if (made := _fits(job, some, memory)) is not None:
            return made
    least, most = 1, max(len(stage.layers) for stages in job.cut.stages for stage in stages)
    if (found := _fits(job, _block(most), memory)) is None:
        return None
    while least < most:
        middle = (least + most) // 2
        if (made := _fits(job, _block(middle), memory)) is not None:
            found, most = made, middle
        else:
            least = middle + 1
    return found


def _block(layers: int) -> RecomputePolicy:
    return RecomputePolicy("full", "block", layers)


def _fits(job: Job, recompute: RecomputePolicy, memory: float) -> Job | None:
    made = dataclasses.replace(job, recompute=recompute)
    return made if fullest(made).total <= memory else None


def divisors(n: int, most: int | None = None) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(n, most or n) + 1) if n % d == 0)
