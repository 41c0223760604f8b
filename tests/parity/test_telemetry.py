"""Telemetry does not depend on the number of ranks, and has the times of all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mega_model.distributed.mesh import World
from mega_train.telemetry.timers import LEVELS, reduce_timers
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import trainer

COUNTED = {"log__log_params_norm": True, "log__log_num_zeros_in_grad": True}
WAITS = {"forward-recv", "backward-recv"}


def _counts_as_one_process(model: str, values: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    run = trainer(model, world, meet, folder, **COUNTED, **values)
    alone = trainer(model, World(), "", folder, **COUNTED)
    for _ in range(2):
        for trained_run in (run, alone):
            trained_run.step(trained_run.state.lr)
        assert run.grad_sync.num_elements == alone.grad_sync.num_elements
        extra, expected = run.optimizer_step.extra, alone.optimizer_step.extra
        assert 0 < extra["num-zeros"] == expected["num-zeros"] < run.grad_sync.num_elements
        assert extra["params-norm"] == pytest.approx(expected["params-norm"], rel=1e-6)
    run.mesh.destroy()


def _knows_the_times_of_all(world: World, meet: str, folder: Path) -> None:
    run = trainer(
        "gpt",
        world,
        meet,
        folder,
        parallel__tensor_model_parallel_size=2,
        parallel__pipeline_model_parallel_size=2,
    )
    run.step(run.state.lr)
    own_times = run.timers.pop()
    for phase in set(LEVELS) - WAITS - {"optimizer-count-zeros"}:
        assert own_times[phase] > 0, phase
    assert ("forward-recv" in own_times) == (run.mesh.pp.rank == 1), "the second stage waits for the first"
    assert ("backward-recv" in own_times) == (run.mesh.pp.rank == 0)
    reduced = reduce_timers(own_times, 2, "all", run.mesh)
    assert {name: reduced[name][world.rank] for name in own_times} == own_times
    assert [seconds > 0 for seconds in reduced["forward-recv"]] == [False, False, True, True]
    ends = reduce_timers(own_times, 2, "minmax", run.mesh)
    assert ends == {name: [min(all_of), max(all_of)] for name, all_of in reduced.items()}
    most = reduce_timers(own_times, 1, "max", run.mesh)
    assert most == {name: [max(all_of)] for name, all_of in reduced.items() if LEVELS[name] == 1}
    run.mesh.destroy()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp and pp": {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 2},
    "tp with sequences, and replicas of ZeRO 1": {
        "parallel__tensor_model_parallel_size": 2,
        "parallel__sequence_parallel": True,
        "parallel__zero_stage": 1,
    },
    "cp, and replicas of ZeRO 3": {"parallel__context_parallel_size": 2, "parallel__zero_stage": 3},
}
CASES: dict[int, dict[str, Body]] = {
    4: {
        "the times of all ranks": _knows_the_times_of_all,
        **{name: partial(_counts_as_one_process, "llama", values) for name, values in LAYOUTS.items()},
    }
}


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in CASES for case in CASES[ranks]])
def test_many_ranks_report_the_same_as_one(outcomes: Outcomes, ranks: int, case: str) -> None:
    assert not (text := outcomes.outcome(ranks, case)), text
