"""Tables of a schedule carried out on abstract time: no process, no tensor.

What a table may get wrong shows here: a pass without what it needs, a message that nobody takes, ranks that
wait for each other. What it costs shows too: how long a step takes, how much of it ranks stand idle, and how
many micro-batches each keeps alive.
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
    Of,
    Pipe,
    ReceiveGradient,
    ReceiveInput,
    SendGradient,
    SendOutput,
    Table,
)


class ScheduleError(Exception):
    """The tables of a schedule cannot be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long things take, in any one unit.

    Attributes:
        forward, input, weight: of one chunk and one micro-batch; a whole backward pass is `input + weight`.
        transfer: from the moment both ends are ready to the arrival.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    transfer: float = 0

    def of(self, action: Compute) -> float:
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
class Span:
    """A pass and when it was computed."""

    action: Compute
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every rank computed when.

    Attributes:
        spans: by rank, in order.
    """

    spans: list[list[Span]]

    @property
    def makespan(self) -> float:
        """From the begin to the end of the last pass."""
        return max(rank[-1].end for rank in self.spans)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which nothing is computed."""
        busy = sum(span.end - span.begin for rank in self.spans for span in rank)
        return 1 - busy / (len(self.spans) * self.makespan)

    def alive(self, rank: int) -> int:
        """Most passes of a rank whose activations are kept at once: forward begun, backward not all done."""
        now = most = 0
        for span in self.spans[rank]:
            now += isinstance(span.action, Forward)
            most = max(most, now)
            now -= isinstance(span.action, Backward | BackwardWeight)
        return most


@dataclass(slots=True)
class _Line:
    """Messages of one kind from a rank to a neighbour: the n-th that is sent is the n-th received."""

    transfer: float
    sent: list[tuple[Of, float]] = field(default_factory=list)
    awaited: list[tuple[Of, float]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def meet(self) -> None:
        while len(self.arrived) < min(len(self.sent), len(self.awaited)):
            (what, begun), (wanted, ready) = self.sent[len(self.arrived)], self.awaited[len(self.arrived)]
            if what != wanted:
                raise ScheduleError(f"{wanted} is awaited where {what} is sent")
            before = self.arrived[-1] if self.arrived else 0.0
            self.arrived.append(max(begun, ready, before) + self.transfer)


class _Rank:
    """One rank on its way through its table.

    Attributes:
        waits: what it waits for, while it does.
    """

    def __init__(self, table: Table, rank: int, pipe: Pipe, lines: dict[tuple[str, int], _Line]) -> None:
        self.table, self.rank, self.pipe = table, rank, pipe
        self.spans: list[Span] = []
        self.clock = 0.0
        self.waits: Action | None = None
        self._expected: dict[Of, tuple[_Line, int]] = {}
        self._done: set[Of] = set()
        before, after = (rank - 1) % pipe.ranks, (rank + 1) % pipe.ranks
        self._inputs, self._outputs = lines["output", before], lines["output", rank]
        self._gradients, self._back = lines["gradient", after], lines["gradient", rank]

    def run(self, costs: Costs, unreceived: int) -> Iterator[None]:
        """Go on as far as possible; yields where it must wait for another rank."""
        for action in self.table:
            self.waits = action
            match action:
                case ReceiveInput():
                    yield from self._receive(self._inputs, action)
                case ReceiveGradient():
                    yield from self._receive(self._gradients, action)
                case SendOutput(chunk, micro):
                    self._need(Forward(chunk, micro) in self._done, action)
                    yield from self._send(self._outputs, self._name(action, +1), unreceived)
                case SendGradient(chunk, micro):
                    made = {Backward(chunk, micro), BackwardInput(chunk, micro)} & self._done
                    self._need(bool(made), action)
                    yield from self._send(self._back, self._name(action, -1), unreceived)
                case _:
                    yield from self._compute(action, costs.of(action))
        self.waits = None
        if self._expected:
            raise ScheduleError(f"rank {self.rank} receives what it never uses: {list(self._expected)}")

    def _compute(self, action: Compute, cost: float) -> Iterator[None]:
        chunk, micro = action.chunk, action.micro
        self._need(action not in self._done, action)
        match action:
            case Forward() if not self.pipe.first(chunk, self.rank):
                yield from self._arrival(ReceiveInput(chunk, micro), action)
            case Backward() | BackwardInput():
                self._need(Forward(chunk, micro) in self._done, action)
                other = BackwardInput if isinstance(action, Backward) else Backward
                self._need(other(chunk, micro) not in self._done, action)
                if not self.pipe.last(chunk, self.rank):
                    yield from self._arrival(ReceiveGradient(chunk, micro), action)
            case BackwardWeight():
                self._need(BackwardInput(chunk, micro) in self._done, action)
        self.spans.append(Span(action, self.clock, self.clock + cost))
        self.clock += cost
        self._done.add(action)

    def _receive(self, line: _Line, action: Of) -> Iterator[None]:
        yield from self._wait(line, len(line.awaited) - 1)
        self._expected[action] = line, len(line.awaited)
        line.awaited.append((Of(action.chunk, action.micro), self.clock))
        line.meet()

    def _arrival(self, received: Of, action: Compute) -> Iterator[None]:
        self._need(received in self._expected, action)
        line, number = self._expected.pop(received)
        yield from self._wait(line, number)

    def _send(self, line: _Line, what: Of, unreceived: int) -> Iterator[None]:
        line.sent.append((what, self.clock))
        line.meet()
        yield from self._wait(line, len(line.sent) - 1 - unreceived)

    def _wait(self, line: _Line, number: int) -> Iterator[None]:
        """Until message `number` of the line has arrived."""
        if number < 0:
            return
        while len(line.arrived) <= number:
            yield
        self.clock = max(self.clock, line.arrived[number])

    def _name(self, action: Of, step: int) -> Of:
        """What the neighbour that the message goes to calls it: the chunk there, and the micro-batch."""
        stage = action.chunk * self.pipe.ranks + self.rank + step
        if not 0 <= stage < self.pipe.ranks * self.pipe.chunks:
            raise ScheduleError(f"rank {self.rank} sends to a stage that is not: {action}")
        return Of(stage // self.pipe.ranks, action.micro)

    def _need(self, fact: bool, action: Action) -> None:
        if not fact:
            raise ScheduleError(f"rank {self.rank} is not ready for {action}")


def simulate(
    tables: Sequence[Table], pipe: Pipe, costs: Costs | None = None, *, unreceived: int = 1
) -> Timeline:
    """Carry out the tables of all ranks.

    Args:
        unreceived: messages that a rank may have sent on a line, and go on, before the first of them is
            taken; 0 is a transport without any buffer, where to send is to wait for the receiver.

    Raises:
        ScheduleError: a rank does something it cannot do yet or did already, a message is not the one that
            is awaited, a message is never taken, or ranks wait for each other.
    """
    costs = costs or Costs()
    lines = {(kind, r): _Line(costs.transfer) for kind in ("output", "gradient") for r in range(pipe.ranks)}
    ranks = [_Rank(table, rank, pipe, lines) for rank, table in enumerate(tables)]
    left = {rank: rank.run(costs, unreceived) for rank in ranks}
    seen: object = None
    while left:
        left = {rank: way for rank, way in left.items() if next(way, _ENDED) is not _ENDED}
        now = [(rank.clock, rank.waits) for rank in ranks], [len(line.sent) for line in lines.values()]
        if left and now == seen:
            raise ScheduleError("deadlock: " + ", ".join(f"rank {r.rank} at {r.waits}" for r in left))
        seen = now
    for (kind, rank), line in lines.items():
        if len(line.sent) != len(line.awaited):
            raise ScheduleError(
                f"{kind} of rank {rank}: {len(line.sent)} messages sent, {len(line.awaited)} received"
            )
    return Timeline([rank.spans for rank in ranks])


def check(schedule: Callable[[Pipe, int], Table], pipe: Pipe, *, training: bool = True) -> Timeline:
    """Make a schedule's tables and hold them to all that is asked of them, over lines without a buffer.

    Returns:
        how they went, with every part of a pass taking one unit.

    Raises:
        ScheduleError: what `simulate` finds, or a pass is missing.
    """
    line = simulate([schedule(pipe, rank) for rank in range(pipe.ranks)], pipe, unreceived=0)
    all_passes = {(chunk, micro) for chunk in range(pipe.chunks) for micro in range(pipe.micros)}
    for rank, spans in enumerate(line.spans):
        done = [
            {(s.action.chunk, s.action.micro) for s in spans if isinstance(s.action, kinds)}
            for kinds in (Forward, Backward | BackwardInput, Backward | BackwardWeight)
        ]
        wanted = [all_passes, *(2 * [all_passes if training else set()])]
        if done != wanted:
            raise ScheduleError(f"rank {rank} leaves passes out: {[len(some) for some in done]}")
    return line


_ENDED = object()
