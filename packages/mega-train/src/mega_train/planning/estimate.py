"""A job on a machine: memory per rank, traffic per axis, FLOPs, and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from mega_train.planning.communication import Traffic, data_parallel_bytes, stage_bytes, tie_bytes, traffic
from mega_train.planning.flops import hardware_flops, model_flops
from mega_train.planning.hardware import Hardware
from mega_train.planning.memory import Memory, fullest, memory
from mega_train.planning.roofline import Pass, Work
from mega_train.planning.workload import Job, check


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where a step's time goes, on the stage that all others wait for.

    Attributes:
        bubble: waiting for the pipeline to fill and to drain.
        pp, dp: transfers that nothing hides.
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
    """What a job would need and how fast it would be."""

    job: Job
    hardware: Hardware
    seconds: Seconds

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Of a rank at every place of pp."""
        return tuple(memory(self.job, place) for place in range(self.job.layout.pp))

    @property
    def fullest(self) -> Memory:
        """Of the place of pp that holds most."""
        return fullest(self.job)

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.hardware.memory

    @property
    def traffic(self) -> Traffic:
        return traffic(self.job)

    @property
    def mfu(self) -> float:
        """Share of the machine's peak that the model's own FLOPs are (arXiv:2204.02311 appendix B)."""
        return model_flops(self.job) / self._possible

    @property
    def hfu(self) -> float:
        """Share of the peak with recomputation counted as work."""
        return hardware_flops(self.job) / self._possible

    @property
    def _possible(self) -> float:
        return self.seconds.step * self.hardware.peak * self.job.layout.world


def estimate(job: Job, hardware: Hardware) -> Estimate:
    """
    Raises:
        ConfigError, LayoutError: the batch cannot be cut this way.
    """
    check(job)
    cut, work = job.cut, Work.of(job, hardware)
    crossing = _crossing(job, hardware)
    kinds = {_kind(job, place): _passes(job, work, place) for place in cut.kinds}
    slowest = max(kinds.values(), key=_seconds)
    each = sum(_seconds(kinds[_kind(job, place)]) + crossing for place in range(job.layout.pp))
    spent = (slowest[0] + slowest[1]) * job.micros
    seconds = Seconds(
        gemm=spent.gemm,
        attention=spent.attention,
        stream=spent.stream,
        tp=spent.tp,
        cp=spent.cp,
        pp=crossing * job.micros * (1 if job.software.duplex_p2p else 2)
        + _fill_transfers(job, hardware)
        + tie_bytes(job) / hardware.reach(2, job.layout.world // job.layout.pp),
        bubble=max(0.0, each - _seconds(slowest) - crossing - _filled(job, work)) / job.layout.vp,
        dp=_exposed(job, hardware, slowest),
        optimizer=_optimizer(job, hardware),
    )
    return Estimate(job=job, hardware=hardware, seconds=seconds)


def _kind(job: Job, place: int) -> tuple[int, int, bool, bool]:
    stages = job.cut.stages[place]
    return job.cut.depth[place], job.again(stages), stages[0].is_first, stages[-1].is_last


def _passes(job: Job, work: Work, place: int) -> tuple[Pass, Pass]:
    """Forward and backward of one micro-batch on the rank at `place` of pp, all of its stages together."""
    layers, again, first, last = _kind(job, place)
    forward, back = work.layer * layers, work.layer_back * layers + work.layer_again * again
    if first:
        forward, back = forward + work.embedding, back + work.embedding_back
    if last:
        forward, back = forward + work.head, back + work.head_back
    return forward, back


def _seconds(passes: tuple[Pass, Pass]) -> float:
    return passes[0].seconds + passes[1].seconds


def _filled(job: Job, work: Work) -> float:
    """Seconds of the bubble in which a zero-bubble pipeline does weight gradients that it had put off: of the
    (p - 1)(F + B + W) of 1F1B twice W (arXiv:2401.10241 table 2).
    """
    if job.schedule != "zero-bubble":
        return 0.0
    return 2 * work.layer_weights * sum(sorted(job.cut.depth)[:-1])


def _crossing(job: Job, hardware: Hardware) -> float:
    """Seconds of one micro-batch's transfers from a stage to the next, there and back, that nothing hides.

    A stage between two others also receives as much as it sends.
    """
    layout = job.layout
    if layout.pp == 1 or (job.software.overlaps_pp and layout.vp > 1):
        return 0.0
    sent = stage_bytes(job)
    seconds = sent / hardware.reach(2, layout.world // layout.pp)
    if job.software.sliced_p2p and not job.sequence and layout.tp > 1:
        seconds += (layout.tp - 1) * sent / hardware.reach(layout.tp, 1)
    return 2 * layout.vp * seconds


def _fill_transfers(job: Job, hardware: Hardware) -> float:
    """Seconds of transfers that an interleaved pipeline does not hide while it fills and drains.

    Of the passes before its first backward pass and after its last forward pass, on the place in the middle
    (arXiv:2104.04473 §2.2).
    """
    layout, software = job.layout, job.software
    if layout.vp == 1 or not software.overlaps_pp or software.overlaps_pp_fill:
        return 0.0
    passes = min(layout.vp * job.micros, layout.vp * layout.pp - 1)
    return 2 * passes * stage_bytes(job) / hardware.reach(2, layout.world // layout.pp)


def _exposed(job: Job, hardware: Hardware, slowest: tuple[Pass, Pass]) -> float:
    """Seconds of the data-parallel transfers that nothing hides.

    Before stage 2 only one micro-batch's backward pass can hide the sums, which are of all micro-batches.
    Interleaved, the stages of a rank finish one after the other, a round of pp micro-batches apart, and the
    next step needs their weights in such an order (arXiv:2104.04473 figure 4).
    """
    reach = hardware.reach(job.replicas, job.layout.tp)
    down, up = (n / reach for n in data_parallel_bytes(job))
    forward, back = slowest
    if job.software.overlaps_reduce or job.zero == 3:
        down = _unhidden(job, down, back.seconds)
    if job.software.overlaps_gather or job.zero == 3:
        up = _unhidden(job, up, forward.seconds)
    return down + up


def _unhidden(job: Job, sent: float, work: float) -> float:
    """Seconds by which transfers outlast the work they are hidden behind.

    Args:
        work: of one micro-batch on the rank, all of its stages together.
    """
    if job.zero > 1:  # while any micro-batch is computed
        return max(0.0, sent - job.micros * work)
    vp, stage = job.layout.vp, work / job.layout.vp
    rounds = (vp - 1) * min(job.layout.pp, job.micros) * stage
    return max(0.0, sent / vp - stage, sent - rounds - stage)


def _optimizer(job: Job, hardware: Hardware) -> float:
    """Seconds of clearing, measuring and clipping gradients and of AdamW: bytes of the fullest rank."""
    held = max(job.cut.held)
    share = job.replicas if job.zero else 1
    adam = (
        held / share * (16 + 12 + job.precision.weight)
    )  # reads gradient, main, moments; writes all but the first
    rest = held * 4 * job.precision.gradient  # cleared, measured, read and written to be clipped
    return (adam + rest) / (hardware.stream * hardware.bandwidth)
