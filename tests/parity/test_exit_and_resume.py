"""Several ranks exit together, are reproducible, and resume in the middle of a run."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from mega_model.distributed.mesh import World
from mega_train.engine.determinism import deterministic_algorithms
from mega_train.engine.train_loop import TrainLoop
from mega_train.fault_tolerance.exit_conditions import SIGTERM, ExitConditions
from mega_train.telemetry.observers import Observers
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import resumes, same_as_one_process, trainer
from tests.selection import every_nth


def _leaves_together(world: World, meet: str, folder: Path) -> None:
    """One rank is told to end, after its second step; all leave after that step."""
    run = trainer(
        "gpt",
        world,
        meet,
        folder,
        parallel__tensor_model_parallel_size=2,
        parallel__pipeline_model_parallel_size=2,
    )
    last = world.rank == world.size - 1

    def find_signal() -> signal.Signals | None:
        return signal.SIGTERM if last and run.state.iteration >= 2 else None

    conditions = ExitConditions(run.config, run.mesh, received_signal=find_signal)
    assert TrainLoop(run, Observers(), exit_conditions=conditions).run() is SIGTERM
    assert run.state.iteration == 2
    run.mesh.destroy()


def _repeats(world: World, meet: str, folder: Path) -> None:
    """Twice the same run in deterministic mode: losses, norms and weights to the last bit."""
    results = []
    with deterministic_algorithms(True):
        for start in "ab":
            run = trainer(
                "gpt",
                world,
                meet + start,
                folder,
                parallel__tensor_model_parallel_size=2,
                train__deterministic_mode=True,
            )
            losses = [run.step(run.state.lr) for _ in range(4)]
            run.sharding.wait_all_gather()
            results.append((losses, [main.clone() for main in run.sharding.main_params]))
            run.mesh.destroy()
    (first, weights), (second, others) = results
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


# 400 samples are more than an epoch of the corpus; the ramp has 4 sizes, the curriculum 4 lengths
MIDDLE = {
    "batch__micro_batch_size": 1,
    "train__train_samples": 400,
    "optimizer__lr_warmup_iters": 0,
    "optimizer__lr_warmup_samples": 6,
    "batch__rampup_batch_size": (2, 2, 24),
    "curriculum__curriculum_start_length": 4,
    "curriculum__curriculum_steps": 8,
    "curriculum__curriculum_length_multiple": 4,
    "train__hidden_dropout": 0.1,
}
TP2, PP2 = {"parallel__tensor_model_parallel_size": 2}, {"parallel__pipeline_model_parallel_size": 2}


def _tunes(values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    """Replicas with more and with fewer answers make the one mean that one process makes."""
    same_as_one_process("gpt", world, meet, folder, count=3, data__sft=True, **values)


CASES: dict[int, dict[str, Body]] = {
    4: {
        "answers over 4 replicas": partial(_tunes, {}),
        "answers over tp and pp": partial(_tunes, TP2 | PP2),
        "answers over cp and dp": partial(_tunes, {"parallel__context_parallel_size": 2}),
        "ranks leave together": _leaves_together,
        "a deterministic run repeats": _repeats,
        "the middle of ramp-up and curriculum goes on bitwise": partial(
            resumes, "gpt", MIDDLE | TP2, MIDDLE | TP2, True
        ),
        "the middle of ramp-up and curriculum goes on with another layout": partial(
            resumes, "gpt", MIDDLE | TP2, MIDDLE | TP2 | PP2, False
        ),
    }
}


ALL = [(ranks, case) for ranks in CASES for case in CASES[ranks]]


@pytest.mark.parametrize(("ranks", "case"), every_nth(2, ALL))
def test_a_run_exits_and_resumes_alike_on_all_ranks(outcomes: Outcomes, ranks: int, case: str) -> None:
    assert not (text := outcomes.outcome(ranks, case)), text
