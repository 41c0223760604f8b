"""Simulated pipeline schedules for thousands of shapes, and comparison with torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from mega_train.pipeline.schedules import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    PipelineShape,
    ReceiveGradient,
    ReceiveInput,
    Schedule,
    SendGradient,
    SendOutput,
    Table,
    forward_only,
    gpipe,
    one_forward_one_backward,
    zero_bubble,
)
from tests.pipeline_simulator import PassCosts, ScheduleError, check_schedule, simulate

ALL = {**SCHEDULES, "forward only": forward_only}
UNEVEN = PassCosts(forward=1, input=1.25, weight=0.75)  # exact in binary, so that sums may be compared


def shapes(count: int, seed: int) -> list[PipelineShape]:
    """Random pipes, several chunks on several ranks only."""
    rng = random.Random(seed)
    pipes = []
    for _ in range(count):
        ranks = rng.randint(1, 6)
        pipes.append(PipelineShape(ranks, rng.randint(1, 3) if ranks > 1 else 1, rng.randint(1, 14)))
    return pipes


def tables(schedule: Schedule, pipe: PipelineShape) -> list[Table]:
    return [schedule(pipe, rank) for rank in range(pipe.ranks)]


@pytest.mark.parametrize("name", ALL)
def test_every_pass_is_done_once_and_no_rank_waits_in_a_circle_though_no_line_holds_a_message(
    name: str,
) -> None:
    for pipe in shapes(700, seed=1):
        check_schedule(ALL[name], pipe, training=name != "forward only")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward only"])
def test_lines_that_hold_no_message_make_no_rank_wait_longer(name: str) -> None:
    for pipe in shapes(150, seed=2):
        all_tables = tables(ALL[name], pipe)
        strict, loose = (simulate(all_tables, pipe, UNEVEN, max_unreceived=n).makespan for n in (0, 1 << 30))
        assert strict == loose, pipe


def test_no_rank_keeps_more_micro_batches_alive_than_its_schedule_says() -> None:
    for pipe in shapes(200, seed=3):
        ranks, chunks, micros = pipe.ranks, pipe.chunks, pipe.micros
        alive = {
            name: [timeline.micro_batches_in_flight(rank) for rank in range(ranks)]
            for name, timeline in ((n, simulate(tables(s, pipe), pipe)) for n, s in SCHEDULES.items())
        }
        assert alive["gpipe"] == [chunks * micros] * ranks
        if chunks == 1:
            assert alive["1f1b"] == [min(ranks - rank, micros) for rank in range(ranks)]
            assert max(alive["zero-bubble"]) <= alive["1f1b"][0]
        else:
            # rounds are of `ranks` micro-batches, longer by what does not divide
            longest = -(-micros // max(1, micros // ranks))
            fill = [(chunks - 1) * longest + 2 * (ranks - rank - 1) for rank in range(ranks)]
            assert alive["1f1b"] == [min(filled + 1, chunks * micros) for filled in fill]
            assert max(alive["zero-bubble"]) <= alive["1f1b"][0]


@pytest.mark.parametrize("costs", [PassCosts(), UNEVEN])
@pytest.mark.parametrize(("ranks", "micros"), [(1, 3), (2, 2), (3, 7), (4, 4), (4, 8), (6, 12), (8, 16)])
def test_a_step_takes_as_long_as_the_papers_say(ranks: int, micros: int, costs: PassCosts) -> None:
    whole = costs.forward + costs.input + costs.weight

    def makespan(schedule: Schedule, chunks: int = 1) -> float:
        pipe = PipelineShape(ranks, chunks, micros)
        return simulate(tables(schedule, pipe), pipe, costs).makespan

    # arXiv:2104.04473 §2.2.1: (p - 1) passes of bubble
    assert makespan(gpipe) == makespan(one_forward_one_backward) == (micros + ranks - 1) * whole
    if ranks > 1 and micros % ranks == 0:  # §2.2.2: (p - 1) / v of them, here in passes of a chunk
        for chunks in (2, 3):
            assert makespan(one_forward_one_backward, chunks) == (chunks * micros + ranks - 1) * whole
    if micros >= ranks:  # arXiv:2401.10241 table 2, ZB-H1: (p - 1)(F + B - W)
        bubble = (ranks - 1) * (costs.forward + costs.input - costs.weight)
        assert makespan(zero_bubble) == pytest.approx(micros * whole + bubble)


def test_the_bubble_is_the_share_of_time_in_which_nothing_is_computed() -> None:
    pipe = PipelineShape(4, 1, 8)
    timeline = simulate(tables(one_forward_one_backward, pipe), pipe)
    assert timeline.bubble == pytest.approx(3 / (8 + 3))
    assert simulate(tables(zero_bubble, pipe), pipe).bubble == pytest.approx(1 / (8 + 1))


def test_several_chunks_and_apart_weights_never_lengthen_a_step() -> None:
    for pipe in shapes(150, seed=4):
        plain = simulate(tables(one_forward_one_backward, pipe), pipe).makespan
        assert simulate(tables(zero_bubble, pipe), pipe).makespan <= plain, pipe
        whole = PipelineShape(pipe.ranks, 1, pipe.micros)
        costs = PassCosts(forward=pipe.chunks, input=pipe.chunks, weight=pipe.chunks)
        if pipe.micros >= pipe.ranks:
            assert plain <= simulate(tables(one_forward_one_backward, whole), whole, costs).makespan, pipe


def test_messages_travel_while_ranks_compute() -> None:
    # of all transfers only those to the last rank and back are waited for
    pipe, costs = PipelineShape(4, 1, 8), PassCosts(transfer=0.5)
    timeline = simulate(tables(gpipe, pipe), pipe, costs)
    assert timeline.makespan == (8 + 3) * 3 + 2 * 3 * 0.5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda all_tables: all_tables[1].remove(ReceiveInput(0, 2)), r"rank 1 is not ready for Forward"),
        (
            lambda all_tables: all_tables[0].remove(SendOutput(0, 1)),
            r"micro=1\) is awaited where .* micro=2\) is sent",
        ),
        (
            lambda all_tables: all_tables[0].remove(SendOutput(0, 2)),
            r"deadlock: .*rank 1 at Forward\(chunk=0, micro=2\)",
        ),
        (lambda all_tables: all_tables[0].append(SendOutput(0, 2)), r"deadlock: rank 0 at SendOutput"),
        (
            lambda all_tables: all_tables[1].insert(0, SendGradient(0, 0)),
            r"rank 1 is not ready for SendGradient",
        ),
        (
            lambda all_tables: all_tables[1].append(Forward(0, 0)),
            r"rank 1 is not ready for Forward\(chunk=0, micro=0\)",
        ),
        (
            lambda all_tables: all_tables[0].append(ReceiveGradient(0, 3)),
            r"rank 0 receives what it never uses",
        ),
        (
            lambda all_tables: all_tables[1].append(BackwardWeight(0, 0)),
            r"rank 1 is not ready for BackwardWeight",
        ),
        (lambda all_tables: all_tables[1].append(SendOutput(0, 0)), r"rank 1 sends to a stage that is not"),
    ],
)
def test_a_table_that_cannot_be_carried_out_is_found(
    spoil: Callable[[list[Table]], None], message: str
) -> None:
    pipe = PipelineShape(2, 1, 3)
    all_tables = tables(one_forward_one_backward, pipe)
    spoil(all_tables)
    with pytest.raises(ScheduleError, match=message):
        simulate(all_tables, pipe, max_unreceived=0)


def test_a_message_that_is_never_taken_and_a_pass_that_is_left_out_are_found() -> None:
    pipe = PipelineShape(2, 1, 3)
    all_tables = tables(one_forward_one_backward, pipe)
    all_tables[0].append(SendOutput(0, 2))
    with pytest.raises(ScheduleError, match="output of rank 0: 4 messages sent, 3 received"):
        simulate(all_tables, pipe)

    def without_weights(pipe: PipelineShape, rank: int) -> Table:
        return [action for action in zero_bubble(pipe, rank) if not isinstance(action, BackwardWeight)]

    with pytest.raises(ScheduleError, match="rank 0 leaves passes out"):
        check_schedule(without_weights, pipe)


# torch's tables, made by its own functions without stages or processes
TORCHS = {
    "FORWARD": Forward,
    "FULL_BACKWARD": Backward,
    "BACKWARD_INPUT": BackwardInput,
    "BACKWARD_WEIGHT": BackwardWeight,
}
Step = tuple[type, int, int]


def compute_steps(table: Table) -> list[Step]:
    return [(type(a), a.chunk, a.micro) for a in table if isinstance(a, tuple(TORCHS.values()))]


def torch_computes(schedule: Any, pipe: PipelineShape, rank: int) -> list[Step]:
    """The order of passes of a schedule of torch.distributed.pipelining on one rank."""
    rounds = max(1, pipe.micros // pipe.ranks)
    sizes = SimpleNamespace(
        _num_stages=pipe.ranks * pipe.chunks,
        num_stages=pipe.ranks * pipe.chunks,
        _n_microbatches=pipe.micros,
        n_local_stages=pipe.chunks,
        pp_group_size=pipe.ranks,
        number_of_rounds=rounds,
        microbatches_per_round=pipe.micros // rounds,
    )
    if hasattr(schedule, "_calculate_single_rank_operations"):
        actions = schedule._calculate_single_rank_operations(sizes, rank)
    else:
        actions = schedule._get_pipeline_order(sizes)[rank]
    return [
        (TORCHS[a.computation_type.name], a.stage_index // pipe.ranks, a.microbatch_index)
        for a in actions
        if a is not None and a.computation_type.name in TORCHS
    ]


def fill(steps: list[Step]) -> int:
    """Forwards before the first backward."""
    return next(number for number, step in enumerate(steps) if step[0] is not Forward)


PLAIN = [PipelineShape(ranks, 1, micros) for ranks in range(1, 7) for micros in range(1, 10)]
# torch asks for rounds of one length
ROUNDS = [
    PipelineShape(ranks, chunks, micros)
    for ranks in range(2, 6)
    for chunks in (2, 3)
    for micros in range(1, 13)
    if micros % max(1, micros // ranks) == 0
]


@pytest.mark.parametrize("pipe", PLAIN, ids=str)
def test_gpipe_and_zero_bubble_compute_in_torchs_order(pipe: PipelineShape) -> None:
    for rank in range(pipe.ranks):
        assert compute_steps(gpipe(pipe, rank)) == torch_computes(torchs.ScheduleGPipe, pipe, rank)
        ours, theirs = zero_bubble(pipe, rank), torchs.ScheduleInterleavedZeroBubble
        assert compute_steps(ours) == torch_computes(theirs, pipe, rank)


@pytest.mark.parametrize("pipe", [pipe for pipe in PLAIN if pipe.micros >= pipe.ranks], ids=str)
def test_1f1b_computes_in_torchs_order(pipe: PipelineShape) -> None:
    # with fewer micro-batches than ranks torch's table is not one that can be carried out
    for rank in range(pipe.ranks):
        theirs = torch_computes(torchs.Schedule1F1B, pipe, rank)
        first = theirs[0][2]
        assert first in (0, 1), "torch 2.13 counts the last stage's forwards from 1, all others from 0"
        theirs = [(kind, c, micro - first if kind is Forward else micro) for kind, c, micro in theirs]
        assert compute_steps(one_forward_one_backward(pipe, rank)) == theirs


@pytest.mark.parametrize("pipe", ROUNDS, ids=str)
def test_interleaved_1f1b_computes_in_torchs_order(pipe: PipelineShape) -> None:
    for rank in range(pipe.ranks):
        ours = compute_steps(one_forward_one_backward(pipe, rank))
        assert ours == torch_computes(torchs.ScheduleInterleaved1F1B, pipe, rank)


@pytest.mark.parametrize("pipe", ROUNDS, ids=str)
def test_zero_bubble_over_chunks_fills_longer_than_torchs_and_does_the_same_passes(
    pipe: PipelineShape,
) -> None:
    """Torch fills one pass for each rank after this one, we as interleaved 1F1B does, two.

    Torch's order relies on lines that hold messages: what goes around the ring is there passes before it is
    wanted. Ours is sound on lines that hold none, and keeps more micro-batches alive for it.
    """
    for rank in range(pipe.ranks):
        ours = compute_steps(zero_bubble(pipe, rank))
        theirs = torch_computes(torchs.ScheduleInterleavedZeroBubble, pipe, rank)
        assert sorted(ours, key=str) == sorted(theirs, key=str)
        most = pipe.chunks * pipe.micros
        assert fill(ours) == min(most, fill(theirs) + pipe.ranks - rank - 1)
        for kind in (Forward, BackwardWeight):
            assert [s for s in ours if s[0] is kind] == [s for s in theirs if s[0] is kind]


@pytest.mark.parametrize(
    "pipe", [PipelineShape(ranks, 2, micros) for ranks in (2, 4) for micros in (8, 12)], ids=str
)
def test_zbv_does_as_many_passes_and_keeps_fewer_alive_for_a_placement_we_do_not_have(
    pipe: PipelineShape,
) -> None:
    """ZB-V (arXiv:2401.10241 §6) assigns a rank's second stage from the other end: the path is a V, no ring.

    Hence its forwards come back a rank sooner, and a rank keeps 2 x ranks passes where the ring's keep more.
    """
    for rank in range(pipe.ranks):
        theirs = torch_computes(torchs.ScheduleZBVZeroBubble, pipe, rank)
        ours = compute_steps(zero_bubble(pipe, rank))
        for kind in (Forward, BackwardWeight):
            assert sum(s[0] is kind for s in ours) == pipe.chunks * pipe.micros
        weights = sum(s[0] in (BackwardWeight, Backward) for s in theirs)
        assert weights == sum(s[0] is Forward for s in theirs) == pipe.chunks * pipe.micros
        alive = most = 0
        for kind, *_ in theirs:
            alive += kind is Forward
            most = max(most, alive)
            alive -= kind in (BackwardWeight, Backward)
        assert most <= 2 * pipe.ranks
        timeline = simulate(tables(zero_bubble, pipe), pipe)
        assert timeline.micro_batches_in_flight(rank) <= 3 * pipe.ranks - 1
