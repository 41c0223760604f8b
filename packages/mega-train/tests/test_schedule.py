"""Every stage's table carried out against the others', as integers: no process, no tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B

from mega_train.schedule import Action, Backward, Exchange, Forward, forward_only, one_forward_one_backward

Schedule = Callable[[int, int, int], list[Action]]
SIZES = [(stages, micros) for stages in range(1, 7) for micros in range(1, 10)]


class Stage:
    """One stage on its way through its table; a message is a kind and a micro-batch.

    An exchange is posted when it is reached, and done when every message of it met its counterpart in an
    exchange that the neighbour has posted too: the strictest that a transport may be.
    """

    def __init__(self, table: list[Action], place: int, stages: int) -> None:
        self.table, self.place, self.stages = table, place, stages
        self.at = 0
        self.inputs: set[int] = set()
        self.gradients: set[int] = set()
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.most_alive = 0

    @property
    def posted(self) -> Exchange | None:
        action = self.table[self.at] if self.at < len(self.table) else None
        return action if isinstance(action, Exchange) else None

    def compute(self) -> bool:
        """Do what needs no neighbour; whether there was any."""
        moved = False
        while self.at < len(self.table) and self.posted is None:
            self._act(self.table[self.at])
            self.at += 1
            moved = True
        return moved

    def _act(self, action: Action) -> None:
        last = self.place == self.stages - 1
        match action:
            case Forward(micro):
                assert self.place == 0 or micro in self.inputs, "forward before its input came"
                assert micro not in self.forwards
                self.forwards.append(micro)
                self.most_alive = max(self.most_alive, len(self.forwards) - len(self.backwards))
            case Backward(micro):
                assert micro in self.forwards, "backward before forward"
                assert last or micro in self.gradients, "backward before its gradient came"
                assert micro not in self.backwards
                self.backwards.append(micro)

    def messages(self, exchange: Exchange) -> tuple[set[tuple[int, str, int]], set[tuple[int, str, int]]]:
        """What it sends and what it receives: (the neighbour, the kind, the micro-batch)."""
        e, before, after = exchange, self.place - 1, self.place + 1
        sends = {(after, "output", e.send_output), (before, "gradient", e.send_gradient)}
        receives = {(before, "output", e.receive_input), (after, "gradient", e.receive_gradient)}
        return _real(sends), _real(receives)

    def finish(self, exchange: Exchange) -> None:
        if exchange.send_output is not None:
            assert exchange.send_output in self.forwards
        if exchange.send_gradient is not None:
            assert exchange.send_gradient in self.backwards
        if exchange.receive_input is not None:
            self.inputs.add(exchange.receive_input)
        if exchange.receive_gradient is not None:
            self.gradients.add(exchange.receive_gradient)
        self.at += 1


def _real(messages: set[tuple[int, str, int | None]]) -> set[tuple[int, str, int]]:
    return {(peer, kind, micro) for peer, kind, micro in messages if micro is not None}


def carry_out(schedule: Schedule, stages: int, micros: int) -> list[Stage]:
    """Run all tables to their end; a test fails where they cannot get there."""
    run = [Stage(schedule(stages, micros, place), place, stages) for place in range(stages)]
    # per stage, what of its posted exchange is done
    met: list[set[tuple[int, str, int]]] = [set() for _ in run]
    while any(stage.at < len(stage.table) for stage in run):
        moved = sum(stage.compute() for stage in run) > 0  # every stage, not up to the first that moved
        for stage in run:
            if stage.posted is None:
                continue
            for peer, kind, micro in stage.messages(stage.posted)[0]:
                other = run[peer].posted
                wanted = (stage.place, kind, micro)
                if other is not None and wanted in run[peer].messages(other)[1] - met[peer]:
                    met[peer].add(wanted)
                    met[stage.place].add((peer, "sent " + kind, micro))
                    moved = True
        for stage in run:
            if stage.posted is not None:
                sends, receives = stage.messages(stage.posted)
                sent = {(peer, "sent " + kind, micro) for peer, kind, micro in sends}
                if sent | receives <= met[stage.place]:
                    stage.finish(stage.posted)
                    met[stage.place] = set()
                    moved = True
        assert moved, f"deadlock: {[(s.place, s.posted) for s in run]}"
    return run


@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_1f1b_comes_to_its_end_with_every_pass_done_once(stages: int, micros: int) -> None:
    for stage in carry_out(one_forward_one_backward, stages, micros):
        assert stage.forwards == stage.backwards == list(range(micros))
        assert stage.most_alive <= stages - stage.place


@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_forward_only_comes_to_its_end_with_every_pass_done_once(stages: int, micros: int) -> None:
    for stage in carry_out(forward_only, stages, micros):
        assert stage.forwards == list(range(micros))
        assert stage.backwards == []


@pytest.mark.parametrize("schedule", [one_forward_one_backward, forward_only])
@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_every_message_that_is_sent_is_received_once(schedule: Schedule, stages: int, micros: int) -> None:
    sent: Counter[tuple[int, int, str, int]] = Counter()
    received: Counter[tuple[int, int, str, int]] = Counter()
    for place in range(stages):
        stage = Stage(schedule(stages, micros, place), place, stages)
        for action in stage.table:
            if isinstance(action, Exchange):
                assert action != Exchange(), "an exchange of nothing"
                sends, receives = stage.messages(action)
                assert all(0 <= peer < stages for peer, _, _ in sends | receives)
                sent.update((place, peer, kind, micro) for peer, kind, micro in sends)
                received.update((peer, place, kind, micro) for peer, kind, micro in receives)
    assert sent == received
    assert all(times == 1 for times in sent.values())
    directions = 2 if schedule is one_forward_one_backward else 1
    assert len(sent) == directions * (stages - 1) * micros


def test_the_simulator_sees_a_deadlock() -> None:
    def both_send_first(stages: int, micros: int, place: int) -> list[Action]:
        table = one_forward_one_backward(stages, micros, place)
        if place == 1:  # the last stage answers before it has asked
            table.insert(0, Exchange(send_gradient=0))
        return table

    with pytest.raises(AssertionError, match="deadlock"):
        carry_out(both_send_first, 2, 2)


@pytest.mark.parametrize(
    ("stages", "micros"), [(stages, micros) for stages, micros in SIZES if micros >= stages]
)
def test_the_order_of_passes_is_that_of_torchs_1f1b(stages: int, micros: int) -> None:
    # the order is a function of these two numbers, where there are as many micro-batches as stages
    sizes = SimpleNamespace(_num_stages=stages, _n_microbatches=micros)
    order = Schedule1F1B._get_pipeline_order(sizes)  # type: ignore[arg-type]
    assert order is not None
    for place in range(stages):
        computed = [(a.computation_type.name, a.microbatch_index) for a in order[place] if a is not None]
        theirs = [action for action in computed if action[0] in ("FORWARD", "FULL_BACKWARD")]
        first = theirs[0][1]
        assert first in (0, 1), "torch 2.13 counts the last stage's forwards from 1, all others from 0"
        theirs = [(kind, micro - first if kind == "FORWARD" else micro) for kind, micro in theirs]
        ours = [
            ("FORWARD" if isinstance(action, Forward) else "FULL_BACKWARD", action.micro)
            for action in one_forward_one_backward(stages, micros, place)
            if not isinstance(action, Exchange)
        ]
        assert ours == theirs
