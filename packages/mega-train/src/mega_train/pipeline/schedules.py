"""Pipeline schedules as tables: for every rank, the list of what it does. Pure functions of integers.

A rank of a pipeline over P ranks holds `chunks` stages of the model: stage s lies on rank s mod P as its
chunk s div P. A schedule orders what a rank computes; from that order alone follows what it sends and
receives when (`_with_transfers`). A table is checked, timed and counted without a process (`simulate`), and
one small executor (`pipeline`) runs any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The sizes a schedule is made for.

    Attributes:
        ranks: of the pipeline.
        chunks: stages that each rank holds.
        micros: micro-batches of an optimizer step.
    """

    ranks: int
    chunks: int
    micros: int

    def is_first_stage(self, chunk: int, rank: int) -> bool:
        """Whether this chunk of this rank is the first stage of all."""
        return chunk == 0 and rank == 0

    def is_last_stage(self, chunk: int, rank: int) -> bool:
        """Whether this chunk of this rank is the last stage of all."""
        return chunk == self.chunks - 1 and rank == self.ranks - 1


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """Something done for one micro-batch by one chunk of the rank whose table it stands in."""

    chunk: int
    micro: int


class Forward(PipelineStep):
    """The forward pass."""


class Backward(PipelineStep):
    """The backward pass, whole."""


class BackwardInput(PipelineStep):
    """The part of the backward pass that the stage before waits for: B of arXiv:2401.10241."""


class BackwardWeight(PipelineStep):
    """The rest, which nobody waits for: products that are gradients of weights, W of arXiv:2401.10241."""


class ReceiveInput(PipelineStep):
    """Begin to receive the chunk's input from the rank before; the forward pass waits for it."""


class SendOutput(PipelineStep):
    """Begin to send the chunk's output to the next rank."""


class ReceiveGradient(PipelineStep):
    """Begin to receive the gradient of the chunk's output from the next rank; backward waits for it."""


class SendGradient(PipelineStep):
    """Begin to send the gradient of the chunk's input to the rank before."""


Compute = Forward | Backward | BackwardInput | BackwardWeight
Transfer = ReceiveInput | SendOutput | ReceiveGradient | SendGradient
Action = Compute | Transfer
Table = list[Action]
Schedule = Callable[[PipelineShape, int], Table]


def gpipe(shape: PipelineShape, rank: int) -> Table:
    """All forward passes, then all backward passes (arXiv:1811.06965): every micro-batch is alive at once."""
    return _with_transfers(_alternate(shape, shape.micros * shape.chunks), shape, rank)


def one_forward_one_backward(shape: PipelineShape, rank: int) -> Table:
    """1F1B (arXiv:2104.04473 §2.2): forwards until the pipeline is full, then in turn, then drain.

    With one chunk to a rank, at most `ranks - rank` micro-batches are alive on it, whatever their number.
    With several it is the interleaved schedule, which fills in a chunk's time: a rank goes on with its chunks
    until the first backward pass reaches it. With rounds all of `ranks` micro-batches it is Megatron's order.
    """
    return _with_transfers(_alternate(shape, _warmup_forwards(shape, rank)), shape, rank)


def zero_bubble(shape: PipelineShape, rank: int) -> Table:
    """1F1B whose weight gradients fill the bubble: with one chunk to a rank, ZB-H1 of arXiv:2401.10241 §2.

    A rank puts off the weight gradients of `rank` passes: as many as there are ranks before it, which would
    wait for them. So with one chunk no rank holds more micro-batches than the first rank of 1F1B does.
    """
    return _with_transfers(
        list(_split_backward(_alternate(shape, _warmup_forwards(shape, rank)), rank)), shape, rank
    )


def forward_only(shape: PipelineShape, rank: int) -> Table:
    """Every micro-batch through the stages once, as validation does."""
    return _with_transfers(list(_passes(shape)[0]), shape, rank)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero-bubble": zero_bubble}
)


def _warmup_forwards(shape: PipelineShape, rank: int) -> int:
    """Forwards of 1F1B before the first backward: as many as it takes one to come back to this rank."""
    ranks_after = shape.ranks - rank - 1
    if shape.chunks == 1:
        return ranks_after
    return (shape.chunks - 1) * len(_micro_batch_rounds(shape)[0]) + 2 * ranks_after


def _micro_batch_rounds(shape: PipelineShape) -> list[range]:
    """The micro-batches in the rounds in which they go over a rank's chunks: chunk 0, then 1, and so on.

    Rounds of `ranks` keep every rank busy. What does not divide makes some rounds longer, never shorter: in a
    shorter one a rank would wait for a micro-batch to come around. The longer ones come first.
    """
    count = max(1, shape.micros // shape.ranks)
    micros_per_round, longer = divmod(shape.micros, count)
    bounds = [i * micros_per_round + min(i, longer) for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _passes(shape: PipelineShape) -> tuple[list[Forward], list[Backward]]:
    """All passes of a rank, each kind in the order in which every rank does it."""
    rounds = _micro_batch_rounds(shape)
    chunks = range(shape.chunks)
    forwards = [
        Forward(chunk, micro) for micro_batches in rounds for chunk in chunks for micro in micro_batches
    ]
    backwards = [
        Backward(chunk, micro)
        for micro_batches in rounds
        for chunk in reversed(chunks)
        for micro in micro_batches
    ]
    return forwards, backwards


def _alternate(shape: PipelineShape, warmup: int) -> list[Compute]:
    """`fill` forwards, then one forward and one backward in turn, then the backwards that remain."""
    forwards, backwards = _passes(shape)
    order: list[Compute] = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += forward, backward
    return order + backwards[max(0, len(forwards) - warmup) :]


def _split_backward(order: list[Compute], delay: int) -> Iterator[Compute]:
    """Split every backward pass; the weights' part follows the inputs' part of `later` passes after it."""
    passes = [action for action in order if isinstance(action, Backward)]
    weights = [BackwardWeight(action.chunk, action.micro) for action in passes]
    started = 0
    for action in order:
        if isinstance(action, Backward):
            yield BackwardInput(action.chunk, action.micro)
            if started >= delay:
                yield weights[started - delay]
            started += 1
        else:
            yield action
    yield from weights[max(0, started - delay) :]


def _with_transfers(order: list[Compute], shape: PipelineShape, rank: int) -> Table:
    """The table of a rank that computes in this order.

    A result is sent as soon as it is there. What a pass needs begins to be received one pass of its kind
    before, so that it travels while this rank computes. What comes around from the last rank to the first, or
    back, is there earlier when a round is longer than `ranks`, by as many passes, and is received so much
    earlier. No line between two ranks then ever has to hold more than the one message that travels on it.

    All ranks do forwards in one order and backwards in one order; hence what a rank receives of a kind comes
    in the order in which its neighbour sends it, and no message needs a name.
    """
    extra = {
        micro: max(0, len(micro_batches) - shape.ranks)
        for micro_batches in _micro_batch_rounds(shape)
        for micro in micro_batches
    }
    receives: list[Table] = [[] for _ in order]
    for kinds, wrap_rank in ((Forward, 0), (Backward | BackwardInput, shape.ranks - 1)):
        positions = [position for position, action in enumerate(order) if isinstance(action, kinds)]
        for number, position in enumerate(positions):
            needed = _required_transfer(order[position], shape, rank)
            if needed is not None:
                ahead = 1 + (extra[needed.micro] if rank == wrap_rank else 0)
                receives[positions[number - ahead] if number else max(0, position - 1)].append(needed)
    table: Table = []
    for action, started in zip(order, receives, strict=True):
        produced = _produced_transfer(action, shape, rank)
        table += [*started, action, *([] if produced is None else [produced])]
    return table


def _required_transfer(action: Compute, shape: PipelineShape, rank: int) -> Transfer | None:
    match action:
        case Forward(chunk, micro) if not shape.is_first_stage(chunk, rank):
            return ReceiveInput(chunk, micro)
        case Backward(chunk, micro) | BackwardInput(chunk, micro) if not shape.is_last_stage(chunk, rank):
            return ReceiveGradient(chunk, micro)
    return None


def _produced_transfer(action: Compute, shape: PipelineShape, rank: int) -> Transfer | None:
    match action:
        case Forward(chunk, micro) if not shape.is_last_stage(chunk, rank):
            return SendOutput(chunk, micro)
        case Backward(chunk, micro) | BackwardInput(chunk, micro) if not shape.is_first_stage(chunk, rank):
            return SendGradient(chunk, micro)
    return None
