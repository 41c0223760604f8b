"""Estimate a workload on a machine: memory per rank, communication per axis, FLOPs, and step time."""

from __future__ import annotations

from dataclasses import dataclass

from mega_train.planning.communication import (
    CommVolume,
    comm_volume,
    data_parallel_bytes,
    p2p_bytes,
    tied_gradient_bytes,
)
from mega_train.planning.flops import hardware_flops, model_flops
from mega_train.planning.hardware import Hardware
from mega_train.planning.memory import RankMemory, peak_rank, rank_memory
from mega_train.planning.roofline import MicroBatchCost, PassCost
from mega_train.planning.workload import Workload, check_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Seconds of a step by kind, on the slowest stage.

    Attributes:
        bubble: waiting for the pipeline to fill and to drain.
        pp, dp: exposed transfers.
    """

    gemm: float
    attention: float
    stream: float
    tp: float
    cp: float
    pp: float
    bubble: float
    dp: float
    optimizer: float

    @property
    def step(self) -> float:
        return (
            self.gemm
            + self.attention
            + self.stream
            + self.tp
            + self.cp
            + self.pp
            + self.bubble
            + self.dp
            + self.optimizer
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated resources and speed of a workload."""

    workload: Workload
    hardware: Hardware
    seconds: TimeBreakdown

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of a rank, by pipeline rank."""
        return tuple(rank_memory(self.workload, pp_rank) for pp_rank in range(self.workload.layout.pp))

    @property
    def peak_rank(self) -> RankMemory:
        """Memory of the pipeline rank with the highest use."""
        return peak_rank(self.workload)

    @property
    def fits(self) -> bool:
        return self.peak_rank.total <= self.hardware.memory

    @property
    def comm_volume(self) -> CommVolume:
        return comm_volume(self.workload)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs over the machine's peak (arXiv:2204.02311 appendix B)."""
        return model_flops(self.workload) / self._peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: FLOPs with recomputation over the machine's peak."""
        return hardware_flops(self.workload) / self._peak_flops

    @property
    def _peak_flops(self) -> float:
        return self.seconds.step * self.hardware.peak * self.workload.layout.world


def estimate(workload: Workload, hardware: Hardware) -> Estimate:
    """Estimate the memory, communication, FLOPs and step time of a workload.

    Raises:
        ConfigError, LayoutError: the batch cannot be split this way.
    """
    check_batch(workload)
    model = workload.model
    cost = MicroBatchCost.from_workload(workload, hardware)
    p2p_seconds = _p2p_seconds(workload, hardware)
    kinds = {
        _stage_kind(workload, pp_rank): _pass_costs(workload, cost, pp_rank)
        for pp_rank in model.distinct_ranks
    }
    slowest = max(kinds.values(), key=_total_seconds)
    all_stages = sum(
        _total_seconds(kinds[_stage_kind(workload, pp_rank)]) + p2p_seconds
        for pp_rank in range(workload.layout.pp)
    )
    slowest_total = (slowest[0] + slowest[1]) * workload.num_micro_batches
    seconds = TimeBreakdown(
        gemm=slowest_total.gemm,
        attention=slowest_total.attention,
        stream=slowest_total.stream,
        tp=slowest_total.tp,
        cp=slowest_total.cp,
        pp=p2p_seconds * workload.num_micro_batches * (1 if workload.implementation.duplex_p2p else 2)
        + _fill_transfers(workload, hardware)
        + tied_gradient_bytes(workload)
        / hardware.link_bandwidth(2, workload.layout.world // workload.layout.pp),
        bubble=max(0.0, all_stages - _total_seconds(slowest) - p2p_seconds - _bubble_work(workload, cost))
        / workload.layout.vp,
        dp=_exposed_dp_seconds(workload, hardware, slowest),
        optimizer=_optimizer_seconds(workload, hardware),
    )
    return Estimate(workload=workload, hardware=hardware, seconds=seconds)


def _stage_kind(workload: Workload, pp_rank: int) -> tuple[int, int, bool, bool]:
    stages = workload.model.stages[pp_rank]
    return (
        workload.model.layers_per_rank[pp_rank],
        workload.recomputed_layers(stages),
        stages[0].is_first,
        stages[-1].is_last,
    )


def _pass_costs(workload: Workload, cost: MicroBatchCost, pp_rank: int) -> tuple[PassCost, PassCost]:
    """Return the costs of one micro-batch's forward and backward on all stages of pipeline rank `pp_rank`."""
    layers, recomputed, first, last = _stage_kind(workload, pp_rank)
    forward, backward = cost.layer * layers, cost.layer_back * layers + cost.layer_recompute * recomputed
    if first:
        forward, backward = forward + cost.embedding, backward + cost.embedding_back
    if last:
        forward, backward = forward + cost.head, backward + cost.head_back
    return forward, backward


def _total_seconds(passes: tuple[PassCost, PassCost]) -> float:
    return passes[0].seconds + passes[1].seconds


def _bubble_work(workload: Workload, cost: MicroBatchCost) -> float:
    """Return the seconds of the bubble that a zero-bubble pipeline fills with deferred weight gradients.

    Of the (p - 1)(F + B + W) of 1F1B it fills twice W (arXiv:2401.10241 table 2).
    """
    if workload.schedule != "zero-bubble":
        return 0.0
    return 2 * cost.layer_weights * sum(sorted(workload.model.layers_per_rank)[:-1])


def _p2p_seconds(workload: Workload, hardware: Hardware) -> float:
    """Return the seconds of the exposed transfers of one micro-batch between two stages, both ways.

    A stage between two others also receives as much as it sends.
    """
    layout = workload.layout
    if layout.pp == 1 or (workload.implementation.overlaps_pp and layout.vp > 1):
        return 0.0
    sent_bytes = p2p_bytes(workload)
    seconds = sent_bytes / hardware.link_bandwidth(2, layout.world // layout.pp)
    if workload.implementation.sliced_p2p and not workload.sequence and layout.tp > 1:
        seconds += (layout.tp - 1) * sent_bytes / hardware.link_bandwidth(layout.tp, 1)
    return 2 * layout.vp * seconds


def _fill_transfers(workload: Workload, hardware: Hardware) -> float:
    """Return the seconds of transfers that an interleaved pipeline exposes while it fills and drains.

    They belong to the passes before the first backward pass and after the last forward pass of the middle
    pipeline rank (arXiv:2104.04473 §2.2).
    """
    layout = workload.layout
    implementation = workload.implementation
    if layout.vp == 1 or not implementation.overlaps_pp or implementation.overlaps_pp_fill:
        return 0.0
    passes = min(layout.vp * workload.num_micro_batches, layout.vp * layout.pp - 1)
    return 2 * passes * p2p_bytes(workload) / hardware.link_bandwidth(2, layout.world // layout.pp)


def _exposed_dp_seconds(workload: Workload, hardware: Hardware, slowest: tuple[PassCost, PassCost]) -> float:
    """Return the seconds of the exposed data-parallel transfers.

    Before ZeRO stage 2, gradients of all micro-batches are reduced at once, and only one backward pass can
    hide that. Interleaved stages of a rank finish one after the other, a round of pp micro-batches apart, and
    the next step needs their weights in the same order (arXiv:2104.04473 figure 4).
    """
    bandwidth = hardware.link_bandwidth(workload.replicas, workload.layout.tp)
    reduce_seconds, gather_seconds = (n / bandwidth for n in data_parallel_bytes(workload))
    forward, backward = slowest
    if workload.implementation.overlaps_reduce or workload.zero == 3:
        reduce_seconds = _unhidden_seconds(workload, reduce_seconds, backward.seconds)
    if workload.implementation.overlaps_gather or workload.zero == 3:
        gather_seconds = _unhidden_seconds(workload, gather_seconds, forward.seconds)
    return reduce_seconds + gather_seconds


def _unhidden_seconds(workload: Workload, transfer_seconds: float, compute_seconds: float) -> float:
    """Return the seconds by which transfers exceed the computation that overlaps them.

    Args:
        compute_seconds: of one micro-batch on the rank, over all its stages.
    """
    if workload.zero > 1:  # while any micro-batch is computed
        return max(0.0, transfer_seconds - workload.num_micro_batches * compute_seconds)
    vp = workload.layout.vp
    stage_seconds = compute_seconds / workload.layout.vp
    rounds = (vp - 1) * min(workload.layout.pp, workload.num_micro_batches) * stage_seconds
    return max(0.0, transfer_seconds / vp - stage_seconds, transfer_seconds - rounds - stage_seconds)


def _optimizer_seconds(workload: Workload, hardware: Hardware) -> float:
    """Return the seconds to clear, measure and clip gradients and to run AdamW, for the fullest rank."""
    elements = max(workload.model.elements)
    owners = workload.replicas if workload.zero else 1
    adam = (
        elements / owners * (16 + 12 + workload.precision.weight)
    )  # reads gradient, main weight and moments; writes all but the gradient
    clipping = elements * 4 * workload.precision.gradient  # cleared, measured, read and written to be clipped
    return (adam + clipping) / (hardware.stream * hardware.bandwidth)
