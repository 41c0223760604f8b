"""Pipeline schedules as tables: the list of actions of every rank. Pure functions of integers.

A rank of a pipeline over P ranks holds `chunks` stages of the model: stage s is chunk s div P of rank s mod
P. A schedule orders the passes of a rank; sends and receives follow from that order (`_with_transfers`).
`executor` runs any table; `tests/pipeline_simulator.py` checks and times tables without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The sizes of a pipeline.

    Attributes:
        ranks: of the pipeline.
        chunks: stages of each rank.
        micros: micro-batches of an optimizer step.
    """

    ranks: int
    chunks: int
    micros: int

    def is_first_stage(self, chunk: int, rank: int) -> bool:
        """Whether this chunk of this rank is the first stage."""
        return chunk == 0 and rank == 0

    def is_last_stage(self, chunk: int, rank: int) -> bool:
        """Whether this chunk of this rank is the last stage."""
        return chunk == self.chunks - 1 and rank == self.ranks - 1


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """An action for one micro-batch and one chunk of a rank."""

    chunk: int
    micro: int


class Forward(PipelineStep):
    """The forward pass."""


class Backward(PipelineStep):
    """The whole backward pass."""


class BackwardInput(PipelineStep):
    """The gradient of the input, which the previous stage waits for: B of arXiv:2401.10241."""


class BackwardWeight(PipelineStep):
    """The gradients of the weights, which no stage waits for: W of arXiv:2401.10241."""


class ReceiveInput(PipelineStep):
    """Start to receive the chunk's input from the previous rank; the forward pass waits for it."""


class SendOutput(PipelineStep):
    """Start to send the chunk's output to the next rank."""


class ReceiveGradient(PipelineStep):
    """Start to receive the gradient of the chunk's output from the next rank; backward waits for it."""


class SendGradient(PipelineStep):
    """Start to send the gradient of the chunk's input to the previous rank."""


Compute = Forward | Backward | BackwardInput | BackwardWeight
Transfer = ReceiveInput | SendOutput | ReceiveGradient | SendGradient
Action = Compute | Transfer
Table = list[Action]
Schedule = Callable[[PipelineShape, int], Table]


def gpipe(shape: PipelineShape, rank: int) -> Table:
    """Schedule all forward passes, then all backward passes (arXiv:1811.06965).

    All micro-batches are in flight at once.
    """
    return _with_transfers(_alternate(shape, shape.micros * shape.chunks), shape, rank)


def one_forward_one_backward(shape: PipelineShape, rank: int) -> Table:
    """Schedule 1F1B (arXiv:2104.04473 §2.2): forwards until the pipeline is full, then alternate, then drain.

    With one chunk per rank, at most `ranks - rank` micro-batches are in flight on it, whatever their number.
    With several it is the interleaved schedule: a rank continues with its next chunks until the first
    backward pass reaches it. If all rounds have `ranks` micro-batches, it is Megatron's order.
    """
    return _with_transfers(_alternate(shape, _warmup_forwards(shape, rank)), shape, rank)


def zero_bubble(shape: PipelineShape, rank: int) -> Table:
    """Schedule 1F1B with weight gradients in the bubble; ZB-H1 of arXiv:2401.10241 §2 with one chunk.

    A rank defers the weight gradients of `rank` passes: one for each previous rank, which would wait for
    them. So with one chunk no rank holds more micro-batches than the first rank of 1F1B does.
    """
    return _with_transfers(
        list(_split_backward(_alternate(shape, _warmup_forwards(shape, rank)), rank)), shape, rank
    )


def forward_only(shape: PipelineShape, rank: int) -> Table:
    """Schedule one forward pass of every micro-batch, as a validation needs."""
    return _with_transfers(list(_passes(shape)[0]), shape, rank)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero-bubble": zero_bubble}
)


def _warmup_forwards(shape: PipelineShape, rank: int) -> int:
    """Count the forwards of 1F1B before a rank's first backward."""
    ranks_after = shape.ranks - rank - 1
    if shape.chunks == 1:
        return ranks_after
    return (shape.chunks - 1) * len(_micro_batch_rounds(shape)[0]) + 2 * ranks_after


def _micro_batch_rounds(shape: PipelineShape) -> list[range]:
    """Divide the micro-batches into the rounds in which they pass a rank's chunks 0, 1, and so on.

    Rounds of `ranks` keep every rank busy. A remainder makes some rounds longer, never shorter: in a shorter
    one a rank would wait for a micro-batch to come around. The longer ones come first.
    """
    count = max(1, shape.micros // shape.ranks)
    micros_per_round, longer = divmod(shape.micros, count)
    bounds = [i * micros_per_round + min(i, longer) for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _passes(shape: PipelineShape) -> tuple[list[Forward], list[Backward]]:
    """List all passes of a rank; every rank does each kind in this order."""
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
    """Order `warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    forwards, backwards = _passes(shape)
    order: list[Compute] = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += forward, backward
    return order + backwards[max(0, len(forwards) - warmup) :]


def _split_backward(order: list[Compute], delay: int) -> Iterator[Compute]:
    """Split every backward pass; its weight gradients follow the input gradients of `delay` passes later."""
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
    """Add sends and receives to an order of passes.

    A result is sent as soon as it is computed. The receive of a pass's input starts one pass of its kind
    earlier, to overlap with computation. A message from the last rank to the first, or back, is ready earlier
    by as many passes as a round is longer than `ranks`, and is received that much earlier. Then no channel
    ever has to hold more than the one message in flight.

    All ranks do forwards in one order and backwards in one order. So a rank receives messages of a kind in
    the order in which its neighbour sends them, and no message needs a tag.
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
