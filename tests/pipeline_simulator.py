"""Simulate the tables of a pipeline schedule on abstract time: no process, no tensor.

It finds errors of a table: a pass without its input, a message that is never received, a deadlock. It
measures the time of a step, the idle share (bubble) and the micro-batches in flight on each rank. Only tests
and `bench/bubble.py` need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mega_train.pipeline.schedules import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    PipelineShape,
    PipelineStep,
    ReceiveGradient,
    ReceiveInput,
    SendGradient,
    SendOutput,
    Table,
)


class ScheduleError(Exception):
    """The tables of a schedule cannot be executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Durations of passes and transfers, in any one unit.

    Attributes:
        forward, input, weight: of one chunk and one micro-batch; a whole backward pass takes `input +
            weight`.
        transfer: from the moment both ends are ready to the arrival.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    transfer: float = 0

    def cost_of(self, action: Compute) -> float:
        match action:
            case Forward():
                return self.forward
            case Backward():
                return self.input + self.weight
            case BackwardInput():
                return self.input
            case BackwardWeight():
                return self.weight


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """A pass with its start and end time."""

    action: Compute
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The passes of every rank with their times.

    Attributes:
        passes: by rank, in order.
    """

    passes: list[list[ScheduledPass]]

    @property
    def makespan(self) -> float:
        """Time of the end of the last pass."""
        return max(passes[-1].end for passes in self.passes)

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time in which nothing is computed."""
        busy = sum(scheduled.end - scheduled.begin for passes in self.passes for scheduled in passes)
        return 1 - busy / (len(self.passes) * self.makespan)

    def micro_batches_in_flight(self, rank: int) -> int:
        """Count the most micro-batches whose activations a rank keeps at once."""
        in_flight = peak = 0
        for scheduled in self.passes[rank]:
            in_flight += isinstance(scheduled.action, Forward)
            peak = max(peak, in_flight)
            in_flight -= isinstance(scheduled.action, Backward | BackwardWeight)
        return peak


@dataclass(slots=True)
class _Channel:
    """Messages of one kind from a rank to a neighbour: the n-th sent is the n-th received."""

    transfer: float
    sent: list[tuple[PipelineStep, float]] = field(default_factory=list)
    received: list[tuple[PipelineStep, float]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def deliver(self) -> None:
        while len(self.arrived) < min(len(self.sent), len(self.received)):
            (sent_step, send_time), (received_step, ready_time) = (
                self.sent[len(self.arrived)],
                self.received[len(self.arrived)],
            )
            if sent_step != received_step:
                raise ScheduleError(f"{received_step} is awaited where {sent_step} is sent")
            last_arrival = self.arrived[-1] if self.arrived else 0.0
            self.arrived.append(max(send_time, ready_time, last_arrival) + self.transfer)


class _Rank:
    """Simulation of one rank.

    Attributes:
        waiting_for: the action it waits for; None while it does not.
    """

    def __init__(
        self, table: Table, rank: int, shape: PipelineShape, channels: dict[tuple[str, int], _Channel]
    ) -> None:
        self.table = table
        self.rank = rank
        self.pipe = shape
        self.passes: list[ScheduledPass] = []
        self.clock = 0.0
        self.waiting_for: Action | None = None
        self._open_receives: dict[PipelineStep, tuple[_Channel, int]] = {}
        self._completed: set[PipelineStep] = set()
        previous_rank, next_rank = (rank - 1) % shape.ranks, (rank + 1) % shape.ranks
        self._inputs = channels["output", previous_rank]
        self._outputs = channels["output", rank]
        self._output_gradients = channels["gradient", next_rank]
        self._input_gradients = channels["gradient", rank]

    def run(self, costs: PassCosts, max_unreceived: int) -> Iterator[None]:
        """Advance as far as possible; yields where it must wait for another rank."""
        for action in self.table:
            self.waiting_for = action
            match action:
                case ReceiveInput():
                    yield from self._receive(self._inputs, action)
                case ReceiveGradient():
                    yield from self._receive(self._output_gradients, action)
                case SendOutput(chunk, micro):
                    self._require(Forward(chunk, micro) in self._completed, action)
                    yield from self._send(self._outputs, self._peer_step(action, +1), max_unreceived)
                case SendGradient(chunk, micro):
                    produced = {Backward(chunk, micro), BackwardInput(chunk, micro)} & self._completed
                    self._require(bool(produced), action)
                    yield from self._send(self._input_gradients, self._peer_step(action, -1), max_unreceived)
                case _:
                    yield from self._compute(action, costs.cost_of(action))
        self.waiting_for = None
        if self._open_receives:
            raise ScheduleError(f"rank {self.rank} receives what it never uses: {list(self._open_receives)}")

    def _compute(self, action: Compute, cost: float) -> Iterator[None]:
        chunk, micro = action.chunk, action.micro
        self._require(action not in self._completed, action)
        match action:
            case Forward() if not self.pipe.is_first_stage(chunk, self.rank):
                yield from self._wait_arrival(ReceiveInput(chunk, micro), action)
            case Backward() | BackwardInput():
                self._require(Forward(chunk, micro) in self._completed, action)
                other_kind = BackwardInput if isinstance(action, Backward) else Backward
                self._require(other_kind(chunk, micro) not in self._completed, action)
                if not self.pipe.is_last_stage(chunk, self.rank):
                    yield from self._wait_arrival(ReceiveGradient(chunk, micro), action)
            case BackwardWeight():
                self._require(BackwardInput(chunk, micro) in self._completed, action)
        self.passes.append(ScheduledPass(action, self.clock, self.clock + cost))
        self.clock += cost
        self._completed.add(action)

    def _receive(self, channel: _Channel, action: PipelineStep) -> Iterator[None]:
        yield from self._wait(channel, len(channel.received) - 1)
        self._open_receives[action] = channel, len(channel.received)
        channel.received.append((PipelineStep(action.chunk, action.micro), self.clock))
        channel.deliver()

    def _wait_arrival(self, receive: PipelineStep, action: Compute) -> Iterator[None]:
        self._require(receive in self._open_receives, action)
        channel, number = self._open_receives.pop(receive)
        yield from self._wait(channel, number)

    def _send(self, channel: _Channel, step: PipelineStep, max_unreceived: int) -> Iterator[None]:
        channel.sent.append((step, self.clock))
        channel.deliver()
        yield from self._wait(channel, len(channel.sent) - 1 - max_unreceived)

    def _wait(self, channel: _Channel, number: int) -> Iterator[None]:
        """Wait until message `number` of the channel has arrived."""
        if number < 0:
            return
        while len(channel.arrived) <= number:
            yield
        self.clock = max(self.clock, channel.arrived[number])

    def _peer_step(self, action: PipelineStep, offset: int) -> PipelineStep:
        """Return the receiver's chunk and micro-batch of a message."""
        stage = action.chunk * self.pipe.ranks + self.rank + offset
        if not 0 <= stage < self.pipe.ranks * self.pipe.chunks:
            raise ScheduleError(f"rank {self.rank} sends to a stage that is not: {action}")
        return PipelineStep(stage // self.pipe.ranks, action.micro)

    def _require(self, is_ready: bool, action: Action) -> None:
        if not is_ready:
            raise ScheduleError(f"rank {self.rank} is not ready for {action}")


def simulate(
    tables: Sequence[Table], shape: PipelineShape, costs: PassCosts | None = None, *, max_unreceived: int = 1
) -> Timeline:
    """Simulate the tables of all ranks.

    Args:
        max_unreceived: messages that a rank may have sent on a channel before the first of them is received;
            0 is a transport without buffers, where a send waits for the receiver.

    Raises:
        ScheduleError: an action is not possible or repeated, a message differs from the expected one or is
            never received, or ranks deadlock.
    """
    costs = costs or PassCosts()
    channels = {
        (kind, r): _Channel(costs.transfer) for kind in ("output", "gradient") for r in range(shape.ranks)
    }
    ranks = [_Rank(table, rank, shape, channels) for rank, table in enumerate(tables)]
    unfinished = {rank: rank.run(costs, max_unreceived) for rank in ranks}
    previous_state: object = None
    while unfinished:
        unfinished = {
            rank: steps for rank, steps in unfinished.items() if next(steps, _FINISHED) is not _FINISHED
        }
        state = (
            [(rank.clock, rank.waiting_for) for rank in ranks],
            [len(channel.sent) for channel in channels.values()],
        )
        if unfinished and state == previous_state:
            raise ScheduleError(
                "deadlock: " + ", ".join(f"rank {r.rank} at {r.waiting_for}" for r in unfinished)
            )
        previous_state = state
    for (kind, rank), channel in channels.items():
        if len(channel.sent) != len(channel.received):
            raise ScheduleError(
                f"{kind} of rank {rank}: {len(channel.sent)} messages sent, {len(channel.received)} received"
            )
    return Timeline([rank.passes for rank in ranks])


def check_schedule(
    schedule: Callable[[PipelineShape, int], Table], shape: PipelineShape, *, training: bool = True
) -> Timeline:
    """Build a schedule's tables and check them on channels without buffers.

    Returns:
        the timeline, with a cost of one for every part of a pass.

    Raises:
        ScheduleError: as in `simulate`, or a pass is missing.
    """
    timeline = simulate([schedule(shape, rank) for rank in range(shape.ranks)], shape, max_unreceived=0)
    all_passes = {(chunk, micro) for chunk in range(shape.chunks) for micro in range(shape.micros)}
    for rank, passes in enumerate(timeline.passes):
        computed = [
            {(s.action.chunk, s.action.micro) for s in passes if isinstance(s.action, kinds)}
            for kinds in (Forward, Backward | BackwardInput, Backward | BackwardWeight)
        ]
        expected = [all_passes, *(2 * [all_passes if training else set()])]
        if computed != expected:
            raise ScheduleError(f"rank {rank} leaves passes out: {[len(keys) for keys in computed]}")
    return timeline


_FINISHED = object()
